"""Text from elsewhere is shown escaped and bounded."""

from snip_hf.text import printable


def test_letters_of_all_scripts_stay() -> None:
    assert printable("model.layers.0 \u5c42 \u03b1\u00e9 \U0001f600") == "model.layers.0 \u5c42 \u03b1\u00e9 \U0001f600"


def test_characters_that_are_not_printable_are_escaped() -> None:
    given = "a\u00a0b\u3000c\u200bd\u202ee\x1b[31mf\ng\u2028h\udcffi\x00"
    assert printable(given) == r"a\xa0b\u3000c\u200bd\u202ee\x1b[31mf\ng\u2028h\udcffi\x00"


def test_the_escaped_text_is_printable_and_can_be_encoded() -> None:
    shown = printable("".join(map(chr, range(0x11000))), limit=10**6)
    assert shown.isprintable() and shown.encode("utf-8").decode("utf-8") == shown


def test_long_text_is_cut_after_the_escapes() -> None:
    assert printable("x" * 1000) == "x" * 1000
    assert printable("x" * 1001) == "x" * 997 + "..."
    assert printable("\u202e" * 10**6, limit=20) == r"\u202e\u202e\u202e"[:17] + "..."


def test_objects_are_shown_by_their_text() -> None:
    assert printable(None) == "None"
    assert printable(ValueError("a\tb")) == r"a\tb"
