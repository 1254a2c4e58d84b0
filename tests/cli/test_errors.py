"""What a refusal at the start says, on a terminal: as it was meant, whatever is in it."""

from __future__ import annotations

import pytest

from infer.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--sessions", "nosuch://x"], "needs the extra: infer[postgres])"),
        (["plan", "[/foo]"], "infer: [/foo] "),
        (["serve", "--host", "[red]x[/]"], "'[red]x[/]' is not an address"),
    ],
)
def test_brackets_are_no_markup(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--port", "0"] if arguments[0] == "serve" else arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
