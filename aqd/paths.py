"""Where the data folders of the project are: ``sql``, ``plugins``, ``etc``.

Used by every process. In an installed wheel they lie in ``aqd/_data``; in a checkout or an editable
install they are the top-level folders. (Package-dir tricks that would unify the two break editable
installs, hence this locator.)
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The folder ``name`` (``"sql"``, ``"plugins"`` or ``"etc"``); :class:`FileNotFoundError` if the
    installation is incomplete."""
    for candidate in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"aqd: the folder {name!r} is in neither {_PACKAGE}/_data nor {_PACKAGE.parent}")
