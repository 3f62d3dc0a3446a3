"""Finds config groups and their options by listing folders: no Hydra, so that completion is quick.

The search path is `conf/` of the installation, then the folder of `--config-dir`. Where both hold
an option of one name, the first wins, as in Hydra. A root config (`--config-name`) that only the
user's folder has puts that folder first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from air_hpc.errors import BadInput, nearest
from air_hpc.resources import conf_dir


@dataclass(frozen=True)
class ConfigFolders:
    """The folders that configs are read from, in the order of precedence."""

    folders: tuple[Path, ...]

    @classmethod
    def find(cls, config_dir: str | Path | None = None) -> ConfigFolders:
        """The installation's `conf/` and a folder of the user's; BadInput if that is no folder."""
        folders = [conf_dir()]
        if config_dir is not None:
            extra = Path(config_dir).expanduser().absolute()
            if not extra.is_dir():
                raise BadInput.single(
                    "--config-dir", config_dir, "no such folder", allowed="a folder of configs"
                )
            folders.append(extra)
        return cls(tuple(folders))

    def with_root(self, config_name: str) -> ConfigFolders:
        """The same folders, the one that holds the root config first; BadInput if none does."""
        for folder in self.folders:
            if (folder / f"{config_name}.yaml").is_file() and _is_plain(config_name):
                others = tuple(other for other in self.folders if other != folder)
                return ConfigFolders((folder, *others))
        names = sorted({path.stem for folder in self.folders for path in folder.glob("*.yaml")})
        raise BadInput.single(
            "--config-name",
            config_name,
            "no such config",
            allowed=", ".join(names),
            hint=nearest(config_name, names),
        )

    def groups(self) -> list[str]:
        """The names of all groups (`model`, `cluster`, and those of a user's own)."""
        found = {
            entry.name
            for folder in self.folders
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith((".", "_"))
        }
        return sorted(found)

    def is_group(self, name: str) -> bool:
        """Whether a folder of that name exists; a nested group is written with slashes."""
        return _is_plain(name) and any((folder / name).is_dir() for folder in self.folders)

    def options(self, group: str) -> list[str]:
        """The names that `group=` may take."""
        found = {
            path.stem
            for folder in self.folders
            for path in (folder / group).glob("*.yaml")
            if path.is_file()
        }
        return sorted(found)

    def file(self, group: str, option: str) -> Path | None:
        """The file behind one option, or None."""
        for folder in self.folders:
            path = folder / group / f"{option}.yaml"
            if _is_plain(f"{group}/{option}") and path.is_file():
                return path
        return None


def _is_plain(name: str) -> bool:
    parts: Sequence[str] = name.split("/")
    return all(part not in ("", ".", "..") for part in parts) and "\0" not in name
