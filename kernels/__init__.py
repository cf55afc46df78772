"""Packed formats' arithmetic: what the bytes mean, and the code that writes and reads them.

This room knows nothing of Hydra, pluggy, transformers or models.

It is ``kvbench.kernels``. Python also finds this folder as ``kernels`` when it runs in the root of the repository, in
front of the package of that name on PyPI, which transformers uses where it is installed. Imported under that name, the
folder steps aside for the installed package; without one it is an empty module, which transformers takes for absent.
"""


def _step_aside() -> None:
    """Turn this module into the installed package ``kernels``, if there is one further down ``sys.path``."""
    import sys
    from importlib.machinery import PathFinder
    from pathlib import Path

    root = Path(__file__).resolve().parent.parent
    spec = PathFinder.find_spec("kernels", [entry for entry in sys.path if Path(entry or ".").resolve() != root])
    if spec is None or spec.loader is None or spec.origin is None:
        return
    module = sys.modules["kernels"]
    module.__spec__, module.__file__, module.__path__ = spec, spec.origin, list(spec.submodule_search_locations or ())
    module.__doc__, module.__loader__ = None, spec.loader
    spec.loader.exec_module(module)


if __name__ == "kernels":
    _step_aside()
