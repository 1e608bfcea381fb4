"""Importing a package that may fail and leave a mess.

AITER's import, as seen in its wheel 0.1.7 on a machine without ROCm: it replaces ``ignore_logger_methods`` of Dynamo's
config, gives its logger a handler, puts its own folders on ``sys.path``, loads helpers under names as common as
``file_baton`` and ``hipify``, and then raises RuntimeError. On ROCm it also sets ``AITER_ASM_DIR``.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

_LOCK = threading.RLock()


def import_contained(name: str) -> ModuleType | str:
    """Import a module; if that raises, take back what the import changed and say what happened.

    Catches everything but KeyboardInterrupt. Whether the import works or not, Dynamo's ``ignore_logger_methods`` and
    the handlers of the loggers that were there before are put back. After a failure so are the environment,
    ``sys.path`` and ``sys.modules``; other packages that were imported on the way stay (extension modules cannot be
    loaded twice), with the ``sys.path`` entries inside their own folders.

    Returns:
        The module, or one line on why there is none.
    """
    package = name.partition(".")[0]
    with _LOCK:
        before = _State()
        imported = False
        try:
            module = importlib.import_module(name)
            imported = True
        except KeyboardInterrupt:
            raise
        except ModuleNotFoundError as error:
            return f"{name} is not there ({error})" if error.name == name else _failure(name, error)
        except BaseException as error:  # SystemExit too: AITER raises it when its compilers fail
            return _failure(name, error)
        finally:
            before.restore_logging(keep_new=imported)
            if not imported:
                before.restore_imports(package)
    return module


def _failure(name: str, error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"importing {name} raised {type(error).__name__}: {text}" if text else f"importing {name} raised {error!r}"


class _State:
    """What an import may change, as it was."""

    def __init__(self) -> None:
        import torch._dynamo.config as dynamo_config

        self.dynamo_config: Any = dynamo_config
        self.ignored_methods = getattr(dynamo_config, "ignore_logger_methods", None)
        self.handlers = {logger: list(logger.handlers) for logger in _loggers()}
        self.environment = dict(os.environ)
        self.path = list(sys.path)
        self.modules = dict(sys.modules)

    def restore_logging(self, *, keep_new: bool) -> None:
        """Put handlers and Dynamo's setting back; ``keep_new``: loggers that were not there before keep theirs."""
        if getattr(self.dynamo_config, "ignore_logger_methods", None) is not self.ignored_methods:
            self.dynamo_config.ignore_logger_methods = self.ignored_methods
        for logger in _loggers():
            if logger in self.handlers or not keep_new:
                logger.handlers[:] = self.handlers.get(logger, [])

    def restore_imports(self, package: str) -> None:
        """Put ``sys.path`` and the environment back, and drop the modules of ``package`` and of its path entries."""
        new = {name: module for name, module in sys.modules.items() if self.modules.get(name) is not module}
        others = [path for name, module in new.items() if not name.startswith(package) for path in _folders(module)]
        added = [entry for entry in sys.path if entry not in self.path]
        kept = [entry for entry in added if _is_inside(entry, others)]
        own = [entry for entry in added if entry not in kept] + _folders(new.get(package))
        for name, module in new.items():
            file = getattr(module, "__file__", None)
            if name.partition(".")[0] == package or (file is not None and _is_inside(file, own)):
                del sys.modules[name]
        sys.modules.update({name: module for name, module in self.modules.items() if name not in sys.modules})
        sys.path[:] = self.path + kept
        for key in set(os.environ) - set(self.environment):
            del os.environ[key]
        os.environ.update(self.environment)


def _loggers() -> list[logging.Logger]:
    named = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]


def _folders(module: ModuleType | None) -> list[str]:
    return [str(path) for path in getattr(module, "__path__", ())]


def _is_inside(path: str, folders: list[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)
