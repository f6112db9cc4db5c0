"""C++ text from a kernel config."""

from __future__ import annotations

from cute_kernels.jit.compiler import Unit

# name of an output's dtype -> its C++ type, and its bytes
OUT_TYPES = {
    "int8": "int8_t", "int32": "int", "int64": "int64_t", "float32": "float", "float16": "__half",
    "bfloat16": "__nv_bfloat16",
}  # fmt: skip
OUT_BYTES = {"int8": 1, "int32": 4, "int64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
PORTABLE_CLUSTER = 8  # CTAs of a cluster that every GPU with clusters takes


def source_type(dtype: str) -> str:
    """Return the C++ type of an epilogue's source C; ``"none"`` is the type of a C that is not there."""
    return "NoSource" if dtype == "none" else OUT_TYPES[dtype]


def _constants(values: dict[str, object]) -> str:
    """``static constexpr`` members of a C++ struct."""
    lines = []
    for name, value in values.items():
        boolean = isinstance(value, bool)
        lines.append(
            f"  static constexpr {'bool' if boolean else 'int'} {name} = {str(value).lower() if boolean else value};"
        )
    return "".join(f"{line}\n" for line in lines)


class KernelConfig:
    """What one kernel is compiled for: the base of every config.

    A subclass is a frozen dataclass. It names the header and the ``__global__`` template, and gives the members of the
    C++ struct ``magicube::Config`` on which the template is instantiated.
    """

    @property
    def kernel_header(self) -> str:
        """Header of the kernel, from ``cute_kernels/``, such as ``"spmm/panel.cuh"``."""
        raise NotImplementedError

    @property
    def kernel_entry(self) -> str:
        """Name of the ``__global__`` template in namespace ``magicube``."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory per CTA."""
        return 0

    @property
    def shared_carveout(self) -> int:
        """Percent of an SM's memory to set up as shared; -1: the driver's choice.

        A CTA that needs more than is set up waits until the SM is empty: what others start behind may ask for all.
        """
        return -1

    @property
    def wide_cluster(self) -> bool:
        """Whether a cluster has more than `PORTABLE_CLUSTER` CTAs, up to 16."""
        return False

    @property
    def name(self) -> str:
        """Short name, unique among the configs; results files store it."""
        raise NotImplementedError

    def _constants(self) -> dict[str, object]:
        """``static constexpr`` members of ``Config``: int or bool by name."""
        return {}

    def _types(self) -> dict[str, str]:
        """C++ types in ``Config`` by name."""
        return {}

    def _preamble(self) -> str:
        """C++ text before the header."""
        return ""

    def translation_unit(self, arch: str) -> Unit:
        """Return the C++ source of this config for `arch`."""
        types = "".join(f"  using {name} = {value};\n" for name, value in self._types().items())
        source = (
            f'{self._preamble()}#include "{self.kernel_header}"\n'
            f"namespace magicube {{\nstruct Config {{\n{_constants(self._constants())}{types}}};\n"
            "}  // namespace magicube\n"
        )
        return Unit(source, f"magicube::{self.kernel_entry}<magicube::Config>", arch, self.name)
