"""Recordings of what a real Slurm printed: `text("22.05.8", "nodes")`."""

from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = sorted(path.name for path in FIXTURES.iterdir())


def text(version: str, name: str) -> str:
    return (FIXTURES / version / f"{name}.txt").read_text()


def texts(version: str, user: str = "airhpc", groups: str = "airhpc") -> dict[str, str]:
    """What snapshot.ask returned on that site."""
    names = ("config", "partitions", "nodes", "associations", "qos")
    found = {name: text(version, name) for name in names}
    return {**found, "user": user, "groups": groups, "user_account": "research\n"}
