"""What a refusal says on a terminal: as it was meant, whatever is in it."""

from __future__ import annotations

import sys

import pytest

from infer.cli.main import main
from infer.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["needs the extra: infer[postgres])", "[/foo] is neither", "[red]a[/] key", "[bench]"]
)
def test_brackets_are_no_markup(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("setting", text)

    monkeypatch.setattr(sys.modules[main.__module__], "app", refuse)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"infer: setting: {text}\n"
