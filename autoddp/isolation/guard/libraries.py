"""Checks native code before the script loads it: an extension module, or a library by ctypes.

With Landlock, the kernel refuses what such code writes. Without, only code may be loaded that writes no file by a path
of its own, or whose writers `native.py` and `databases.py` redirect.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable
from typing import Any, NoReturn

KNOWN = {
    package: reason
    for reason, packages in {
        "computes in memory": "functorch flash_attn flash_attn_2_cuda xformers apex amp_C fused_layer_norm_cuda numexpr"
        " bottleneck contourpy kiwisolver fontTools pyparsing regex tiktoken markupsafe wrapt charset_normalizer"
        " multidict yarl frozenlist propcache msgpack msgspec ujson orjson simplejson pydantic_core rpds xxhash brotli"
        " _brotli greenlet Levenshtein rapidfuzz optree google",  # google: protobuf's upb
        # numpy's fromfile and tofile call io.open. joblib writes for sklearn in Python. PIL's encoders get descriptors
        # pandas' C parser only reads; pyarrow and tables, which write for it, are not in this list.
        "gets open files or their content from Python": "numpy scipy pandas sklearn PIL matplotlib yaml _yaml ruamel"
        " _ruamel_yaml zstandard lz4",
        # torchvision's write_jpeg and write_png end in write_file.
        "its writers are redirected": "torch torchvision safetensors tokenizers",
        "opens sockets, and files through Python": "aiohttp grpc",
        "its cache is written in Python, and its compilers are programs, which are checked": "triton",
        "its cache is written in Python": "numba",
        "compiles in memory; object files are written in Python": "llvmlite",
        "reads /proc, and alters processes only": "psutil",
        "NVIDIA's driver, by numbers and not by paths": "cuda",
    }.items()
    for package in packages.split()
}
"""Packages with extension modules, and why they may be loaded where no kernel watches them."""

_LIBRARIES = re.compile(
    r"lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+|gomp|iomp5|omp|numa|ibverbs|mlx5|z|ssl|crypto|uuid|System|objc)[.\-]"
    r"|lib(cuda|cudart|cudnn|cublas|cufft|curand|cusolver|cusparse|cupti|nccl|nv|nvidia|torch|c10|shm|caffe2|mkl)"
    r"|lib(amdhip|hip|hsa|roc|rccl|openblas|gfortran|quadmath|tbb|triton)"
)
_COMPILED = re.compile(r"/(torchinductor_[^/]*|\.triton)/")
"""Caches of torch's compilers: arithmetic on tensors, compiled from what they generate themselves."""
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_FILE_FUNCTIONS = frozenset(
    "open open64 openat openat64 openat2 creat creat64 fopen fopen64 freopen freopen64 remove unlink unlinkat rmdir"
    " rename renameat renameat2 renamex_np mkdir mkdirat mknod mknodat mkfifo mkfifoat link linkat symlink symlinkat"
    " truncate truncate64 chmod fchmod fchmodat lchmod chown lchown fchown fchownat utime utimes lutimes futimes"
    " utimensat futimens setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr mkstemp mkostemp mkdtemp"
    " tmpfile chroot mount umount umount2 syscall system popen execl execlp execle execv execve execvp execvpe execveat"
    " posix_spawn posix_spawnp copyfile clonefile chflags lchflags fchflags shm_open shm_unlink sem_open sem_unlink"
    " mq_open mq_unlink shmget shmctl semget semctl semop msgget msgctl msgsnd".split()
)


class Libraries:
    """Checks for the audit events of imports and of ctypes."""

    def __init__(self, landlock: bool, stop: Callable[[str], NoReturn]) -> None:
        self.landlock = landlock
        self.stop = stop
        paths = sysconfig.get_paths()
        self._standard = tuple({f"{os.path.realpath(paths[name])}/" for name in ("stdlib", "platstdlib")})
        self.checks: dict[str, Callable[..., None]] = {
            "import": self.imported,
            "ctypes.dlopen": self.opened,
            "ctypes.dlsym": self.looked_up,
        }

    def imported(self, module: str, path: Any = None, *_more: Any) -> None:
        """An import. For an extension module the event has a path, for any other module none."""
        if self.landlock or not isinstance(path, str) or self._is_standard(path):
            return
        package = module.partition(".")[0]
        if package not in KNOWN and not module.endswith("__mypyc"):  # mypyc: Python's functions, compiled
            self.stop(f"import of {module}, whose native code may write files unseen (this kernel has no Landlock)")

    def _is_standard(self, path: str) -> bool:
        caches = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        if _COMPILED.search(path) or any(path.startswith(cache.rstrip("/") + "/") for cache in caches):
            return True
        return any(
            each.startswith(self._standard) and "/site-packages/" not in each and "/dist-packages/" not in each
            for each in (path, os.path.realpath(path))
        )

    def opened(self, name: Any, *_more: Any) -> None:
        """`ctypes.CDLL`."""
        if self.landlock or not name or not isinstance(name, (str, bytes, os.PathLike)):
            return
        path = os.fsdecode(name)
        package = re.search(r"/(?:site|dist)-packages/([^/]+)", path)
        if _LIBRARIES.match(os.path.basename(path)) or self._is_standard(path):
            return
        if package is None or package[1].removesuffix(".libs") not in {*KNOWN, "nvidia", "bitsandbytes"}:
            self.stop(f"ctypes loads {path}, which may write files unseen (this kernel has no Landlock)")

    def looked_up(self, _library: Any, name: Any, *_more: Any) -> None:
        """A function of a library that is looked up by name."""
        if isinstance(name, (str, bytes)) and os.fsdecode(name) in _FILE_FUNCTIONS:
            self.stop(f"ctypes calls {os.fsdecode(name)}")
