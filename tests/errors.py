"""What every error message owes its reader."""

import pytest


def refused(call, *words, error=ValueError):
    """The call raises, in one line, and the message holds every word."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert "\n" not in message, message
