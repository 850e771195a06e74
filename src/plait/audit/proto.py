"""XLA's protocol buffers, in so far as an audit reads them.

The text of a program changes with every release of the compiler; the field numbers of
`HloModuleProto` (xla/service/hlo.proto, xla/xla_data.proto) are a wire format that may not. Only
the fields that are read are declared here; the rest of a message stays opaque.
"""

from __future__ import annotations

import functools
from typing import Any

# Message -> field -> (number, kind). Kinds with [] repeat; capitals name a message.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Module": {
        "name": (1, "string"),
        "computations": (3, "Computation[]"),
        "entry_computation_id": (6, "int64"),
        "stack_frame_index": (17, "StackFrameIndex"),
    },
    "Computation": {
        "name": (1, "string"),
        "instructions": (2, "Instruction[]"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
    },
    "Instruction": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "Shape"),
        "metadata": (7, "Metadata"),
        "literal": (8, "Literal"),
        "parameter_number": (9, "int64"),
        "tuple_index": (13, "int64"),
        "custom_call_target": (28, "string"),
        "id": (35, "int64"),
        "operand_ids": (36, "int64[]"),
        "called_computation_ids": (38, "int64[]"),
        "backend_config": (43, "bytes"),
        "replica_groups": (49, "ReplicaGroup[]"),
        "source_target_pairs": (52, "SourceTarget[]"),
        "comparison_direction": (63, "string"),
        "collective_device_list": (87, "DeviceList"),
        "iota_collective_device_list": (92, "IotaGroups"),
        "mesh_axes_replica_group_list": (93, "MeshGroups"),
    },
    "Shape": {
        "element_type": (2, "int64"),
        "dimensions": (3, "int64[]"),
        "tuple_shapes": (4, "Shape[]"),
        "layout": (5, "Layout"),
    },
    "Layout": {"memory_space": (8, "int64")},
    "Literal": {
        "s32s": (4, "int32[]"),
        "s64s": (5, "int64[]"),
        "u32s": (6, "uint32[]"),
        "u64s": (7, "uint64[]"),
        # Narrower integers are bytes, the lowest first, and those below a byte one in a byte.
        "u8s": (3, "bytes"),
        "s8s": (15, "bytes"),
        "u16s": (16, "bytes"),
        "s16s": (17, "bytes"),
        "s4s": (21, "bytes"),
        "u4s": (22, "bytes"),
        "s2s": (26, "bytes"),
        "u2s": (27, "bytes"),
        "s1s": (30, "bytes"),
        "u1s": (31, "bytes"),
    },
    "Metadata": {
        "op_name": (2, "string"),
        "source_file": (3, "string"),
        "source_line": (4, "int64"),
        "stack_frame_id": (15, "int64"),
    },
    "ReplicaGroup": {"replica_ids": (1, "int64[]")},
    "SourceTarget": {"source": (1, "int64"), "target": (2, "int64")},
    "DeviceList": {"replica_groups": (1, "ReplicaGroup[]"), "iota": (2, "IotaGroups")},
    "IotaGroups": {"groups": (1, "int64"), "devices_per_group": (2, "int64")},
    "MeshGroups": {"mesh": (1, "Mesh"), "axes": (2, "AxisReference[]")},
    "Mesh": {"axes": (1, "MeshAxis[]")},
    "MeshAxis": {"name": (1, "string"), "size": (2, "int64")},
    "AxisReference": {"index": (1, "int64"), "part": (2, "AxisPart")},
    "AxisPart": {"before": (1, "int64"), "size": (2, "int64")},
    "StackFrameIndex": {
        "file_names": (1, "string[]"),
        "function_names": (2, "string[]"),
        "file_locations": (3, "FileLocation[]"),
        "stack_frames": (4, "StackFrame[]"),
    },
    "FileLocation": {"file": (1, "int64"), "function": (2, "int64"), "line": (3, "int64")},
    "StackFrame": {"location": (1, "int64"), "parent": (2, "int64")},
}

_ELEMENT_TYPES = """
  invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128
  f8e5m2 f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1
  f4e2m1fn f8e8m0fnu
"""
ELEMENT_TYPES = tuple(_ELEMENT_TYPES.split())
"""XLA's `PrimitiveType`, by number from 0."""


@functools.cache
def _module_class() -> type[Any]:
    # Not by find_spec, which itself raises where no package of Google's is installed.
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError(
            "reading a compiled program needs protobuf, which is not installed: "
            "pip install 'plait[audit]'"
        ) from error

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="plait/audit/hlo.proto", package="plait.audit", syntax="proto3"
    )
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            base = kind.removesuffix("[]")
            field = message.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if kind != base else kinds.LABEL_OPTIONAL
            if base in _MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".plait.audit.{base}"
            else:
                field.type = getattr(kinds, f"TYPE_{base.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("plait.audit.Module"))


def parse(serialized: bytes) -> Any:
    """The message of a serialized `HloModuleProto`."""
    return _module_class().FromString(serialized)
