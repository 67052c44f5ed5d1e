"""Optional dependencies: the package extra that a command needs, and the error if it is not installed."""

from __future__ import annotations

import importlib.util

from vlora.errors import BadConfig

_VIDEO = {"opencv-python-headless": "cv2", "numpy": "numpy"}
_PLANS = _VIDEO | {"pydantic": "pydantic", "edgefirst-tracker": "edgefirst"}
# triton is omitted: it exists for Linux only, and a CPU serves without it.
_SERVE = _VIDEO | {
    "torch": "torch",
    "transformers": "transformers",
    "huggingface-hub": "huggingface_hub",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "pillow": "PIL",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "h11": "h11",
    "httpx": "httpx",
    "python-multipart": "python_multipart",
    "prometheus-client": "prometheus_client",
    "pydantic": "pydantic",
    "psutil": "psutil",
    "greenlet": "greenlet",
    "jinja2": "jinja2",
    "scipy": "scipy",
}
_CLUSTER = _SERVE | {"ray": "ray", "cryptography": "cryptography"}
_FUSE = _SERVE | {"peft": "peft"}
_DEMO = _FUSE | {"scikit-learn": "sklearn", "scikit-image": "skimage"}
_TRACING = _SERVE | {
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
}
EXTRAS = {
    **{"video": _VIDEO, "plans": _PLANS, "serve": _SERVE, "cluster": _CLUSTER, "fuse": _FUSE, "demo": _DEMO},
    **{"tracing": _TRACING, "mcp": _VIDEO | {"mcp": "mcp"}},
}
"""For each extra, the distributions that it installs, with the module that each provides."""

_NAMES_SHOWN = 3


def require(extra: str) -> None:
    """Raise BadConfig if a package of the extra is not installed. Imports none of them."""
    missing = [name for name, module in EXTRAS[extra].items() if not _is_installed(module)]
    if missing:
        shown, more = ", ".join(missing[:_NAMES_SHOWN]), len(missing) - _NAMES_SHOWN
        raise BadConfig(
            f"packages are missing: {shown}{f' and {more} more' if more > 0 else ''}; "
            f"pip install 'vlora[{extra}]', or in a checkout: pip install '.[{extra}]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
