"""A device `fakegpu`, whose memory is that of the host: a tensor of it is no CPU tensor, and mixing
the two raises.

Operations run at once, by their CPU kernels: a tensor is passed to them as a CPU tensor of the same
memory. `install` registers the device for this process, for ever, and makes it the device of
process meshes that name none.
"""

import ctypes
import os
import time
import traceback
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import fshard as fs
from fshard.mesh.layout import host_copies, make
from fshard.recovery import elastic

PACKAGE = f"{os.path.dirname(fs.__file__)}{os.sep}"
NAME = "fakegpu"
BACKEND = f"cpu:gloo,{NAME}:nccl_rules"
"""A backend of torch.distributed: gloo for tensors of the host, the rules of NCCL for those of the
device.
"""

_CPU, _DEVICE = 1, 12  # kinds of devices in DLPack: the second is torch's PrivateUse1
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_address_of = ctypes.pythonapi.PyCapsule_GetPointer
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_registered: list[torch.library.Library] = []
reads: list[str] = []
"""The innermost functions of fshard at each time that values of the device came to the host: the host waits there."""


def _as_tensor_of(kind: int, x: Tensor) -> Tensor:
    """Return a tensor of another kind of device with the same memory, which it keeps alive."""
    capsule = torch._C._to_dlpack(x)
    address = _address_of(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + 8).value = kind  # behind the pointer to the data
    ctypes.c_int32.from_address(address + 12).value = 0
    return torch._C._from_dlpack(capsule)


def on_host(x: Tensor) -> Tensor:
    """Return a CPU tensor with the memory of a tensor, of either device."""
    if x.device.type != NAME:
        return x
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)  # that an operation may resize
    return _as_tensor_of(_CPU, x)


def _run(op, *args, **kwargs):
    """Run an operation on tensors of the device."""
    returns = [item.alias_info for item in op._schema.returns]
    if any(info is not None and not info.is_write for info in returns):
        return op.redispatch(_CPU_KERNELS, *args, **kwargs)  # a view, which touches no elements
    _note_read(op, args)
    if op is torch.ops.aten._copy_from.default:  # the only operation between two devices
        source, target, *_ = args
        on_host(target).copy_(on_host(source))
        return target

    pairs: list[tuple[Tensor, Tensor]] = []

    def lowered(x):
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, Tensor):
            return x
        if x.device.type == "cpu" and x.ndim and op not in _MIXED:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {op} has one on cpu and {NAME}."
            )
        pairs.append((on_host(x), x))
        return pairs[-1][0]

    def raised(y):
        if not isinstance(y, Tensor):
            return y
        for lower, x in pairs:
            if lower is y:
                if x.shape != y.shape:
                    x.data = _as_tensor_of(_DEVICE, y)
                return x
        return _as_tensor_of(_DEVICE, y)

    args, kwargs = tree_map(lowered, (args, kwargs))
    return tree_map(raised, op(*args, **kwargs))


def _note_read(op, args):
    """Note an operation that brings values of the device to the host."""
    is_number = op is torch.ops.aten._local_scalar_dense.default
    is_copy = op is torch.ops.aten._copy_from.default and args[1].device.type == "cpu"
    if is_number or is_copy:
        frames = traceback.extract_stack()
        names = [frame.name for frame in frames if frame.filename.startswith(PACKAGE)]
        reads.append(" ".join(names[-3:]))


_MIXED = {torch.ops.aten.index.Tensor, torch.ops.aten._index_put_impl_.default}
"""Operations that take indices in host memory; many take a number there."""


class Stream:
    """Any stream: the host's main thread, as `nccl_rules` blocks it where NCCL would block the
    stream.
    """

    def record_event(self):
        return self

    def wait_stream(self, other):
        pass

    def synchronize(self):
        while not self.query():
            time.sleep(0.01)

    def query(self) -> bool:
        from tests.mesh.runtimes import nccl_rules

        return not nccl_rules.is_blocked()


class _Module:
    """Answer what torch asks of a device."""

    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    set_device = manual_seed_all = staticmethod(lambda _: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    current_stream = Stream = staticmethod(Stream)
    stream = staticmethod(nullcontext)


def is_installed() -> bool:
    """Return True if this process has the device."""
    return bool(_registered)


def install() -> None:
    """Register the device, once, and make it the default of process meshes."""
    if is_installed():
        return
    _setup_privateuseone_for_python_backend(NAME, _Module())
    _registered.append(torch.library.Library("_", "IMPL"))
    _registered[0].fallback(_run, "PrivateUse1")
    choose = make.choose_device_type

    def choose_device_type(runtime, device):
        is_default = runtime == "process" and device is None
        return NAME if is_default else choose(runtime, device)

    make.choose_device_type = choose_device_type
    elastic.choose_device_type = choose_device_type
    host_copies.compute_event = lambda device: Stream()
    host_copies.pinned_like = lambda x: torch.empty_like(x, device="cpu")
