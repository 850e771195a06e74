"""Documents by their offsets."""

import numpy as np

from errors import refused
from plait import Placed
from plait.packing import lengths_of


def test_a_repeated_last_offset_is_no_document():
    assert lengths_of(np.array([0, 16, 40])).tolist() == [16, 24]
    assert lengths_of([0, 16, 40, 40, 40]).tolist() == [16, 24]
    rank = Placed.zigzag_documents(lengths_of([0, 16, 40, 40, 40]), 2).positions(40)[:20]
    wanted = [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 34, 35, 36, 37, 38, 39]
    assert rank.tolist() == wanted


def test_errors_name_what_is_wrong():
    refused(lambda: lengths_of([0]), "[0]", "[0, 16, 40]")
    refused(lambda: lengths_of([1, 5]), "[1, 5]", "starts at 0")
    refused(lambda: lengths_of(np.array([0, 9, 4], np.uint32)), "fall from 9 to 4")
    refused(lambda: lengths_of([0, 9, 4]), "fall from 9 to 4", "document 1")
    refused(lambda: lengths_of([0, 9, 9, 12]), "document 1 is empty", "9")
    refused(lambda: lengths_of([0, 2**31]), "int32")
