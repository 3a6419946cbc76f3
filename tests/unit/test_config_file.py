"""etc/aqd.toml: every option is there, at its default, with its bounds and the names of its variables."""

import re
import tomllib

import pytest

from aqd import config, paths

TEXT = (paths.data_dir("etc") / "aqd.toml").read_text()
_OPTION = re.compile(r"#(?=[a-z_]+ = |\[)")


def uncommented() -> str:
    return "".join(
        _OPTION.sub("", line, count=1) if _OPTION.match(line) else line for line in TEXT.splitlines(True)
    )


def explanations() -> dict[str, str]:
    """The comment above each option, by key."""
    found, section, comment = {}, "", ""
    for line in TEXT.splitlines():
        bare = _OPTION.sub("", line, count=1) if _OPTION.match(line) else line
        if header := re.fullmatch(r"\[([a-z.]+)\]", bare):
            if header[1] == "plugins.settings":
                found[header[1]] = comment
            else:
                section = header[1]
        elif option := re.match(r"([a-z_]+) = ", bare):
            found[f"{section}.{option[1]}"] = comment
        elif line.startswith("# "):
            comment += f"{line[2:]} "
            continue
        comment = ""
    return found


def test_as_shipped_it_changes_nothing(tmp_path) -> None:
    path = tmp_path / "aqd.toml"
    path.write_text(TEXT)
    assert config.load(str(path), {}) == config.Config()
    assert config.load_with_sources(str(path), {}).sources == {}


def test_uncommented_it_gives_exactly_the_defaults_and_nothing_is_missing(tmp_path) -> None:
    path = tmp_path / "aqd.toml"
    path.write_text(uncommented())
    loaded = config.load_with_sources(str(path), {})
    assert loaded.config == config.Config()
    document = tomllib.loads(path.read_text())
    assert {f"{s}.{name}" for s, table in document.items() for name in table} == set(config.OPTIONS)
    assert list(document) == list(config.Config.__struct_fields__), "sections in the order of the code"


@pytest.mark.parametrize("key", sorted(config.OPTIONS))
def test_each_option_is_explained(key: str) -> None:
    option = config.OPTIONS[key]
    comment = explanations()[key]
    assert len(comment) > 40
    for name in option.env:
        assert re.search(rf"\b{name}\b", comment), f"{key}: the comment does not name {name}"
    if option.low is not None:
        bounds = f"{option.low:.12g} to {option.high:.12g}"
        assert bounds in comment, f"{key}: the comment does not say {bounds}"
    for suffix, unit in (
        ("_s", "Seconds"),
        ("_ms", "Milliseconds"),
        ("_mb", "MiB"),
        ("_bytes", "Bytes"),
        ("_days", "Days"),
    ):
        if option.name.endswith(suffix) and not (suffix == "_s" and option.name.endswith("_ms")):
            assert unit in comment.replace("Bytes of JSON", "Bytes"), (
                f"{key}: the comment does not say {unit}"
            )


def test_it_holds_no_usable_secret() -> None:
    document = tomllib.loads(uncommented())
    assert document["api"]["admin_api_key"] == ""
    assert ":" not in document["database"]["url"].split("://")[1]
