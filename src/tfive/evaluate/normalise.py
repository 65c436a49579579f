"""The normal form of a mathematical answer, which exact match compares.

Normalisation is a fixed chain of named steps on the text. They undo differences of writing (spacing, fonts, units,
separators, ways to write one fraction, the order of a set) and do no arithmetic: 2/4 stays different from 1/2, which
`evaluate.equivalence` is for. The result is still LaTeX, so it can be parsed. What counts as a difference of writing:

- units, currency and percent signs after or before a number, degrees, “x =” and “x ∈” before the answer, and the
  calculation in 5 + 3 = 8;
- 1,234 without a space is one number, 1, 234 is a list of two; inside brackets a comma always separates;
- a list without brackets and a set in braces have no order; tuples, intervals and matrices have one;
- a whole number before a proper fraction is a mixed number;
- case matters in symbols (R is not r) and not in answers that are words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "μ": r"\mu ", "ω": r"\omega ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "²": "^2", "³": "^3", "⁴": "^4", "√": r"\sqrt ", "€": "", "£": "", "\u200b": "",
}  # fmt: skip
_TRANSLATION = str.maketrans(_SYMBOLS)

_ALIASES = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\leqslant": r"\le", r"\geqslant": r"\ge",
    r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[",
    r"\rbrack": "]", r"\varnothing": r"\emptyset", r"\ast": "*", r"\infin": r"\infty", r"\degree": r"^\circ",
    r"\lparen": "(", r"\rparen": ")", r"\thinspace": " ", r"\displaystyle": "", r"\textstyle": "", r"\limits": "",
}  # fmt: skip
_ALIAS = re.compile("|".join(re.escape(name) + r"(?![A-Za-z])" for name in sorted(_ALIASES, key=len, reverse=True)))

_FONTS = re.compile(r"\\(?:mbox|hbox|textrm|textbf|textit|textsf|textnormal|mathrm|mathbf|mathit|operatorname)\b\s*")
_TEXT_UNIT = re.compile(r"(?<=[\w}\])%])[\s~]*\\text\{([^{}]*)\}(?:\^\{?-?\d\}?)?[\s.]*$")
_SPACING = re.compile(r"(?<!\\)\\[,;:>! ]|\\quad\b|\\qquad\b|~|\\(?:hspace|vspace|phantom)\{[^{}]*\}")
_SIZES = re.compile(r"\\(?:left|right|bigl|bigr|biggl|biggr|Bigl|Bigr|big|Big|bigg|Bigg)(?![A-Za-z])\s*\.?")

_UNITS = {
    "cm", "mm", "km", "ft", "in", "mi", "yd", "sq", "kg", "mg", "lb", "lbs", "oz", "ml", "gal", "cup", "ton", "hr",
    "hrs", "min", "sec", "day", "am", "pm", "a.m", "p.m", "mph", "kph", "km/h", "m/s", "deg", "usd", "men",
}  # fmt: skip
"""Units of fewer than four letters; longer words after a number need not be known. Single letters are symbols."""
_SMALL_WORDS = {"a", "an", "the", "of", "per", "to", "in", "at", "for", "one", "each", "more", "less", "than"}
_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z][A-Za-z'\s.-]+")
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER_AND_WORDS = re.compile(rf"([-+]?{_NUMBER}|[-+]?\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|[-+]?\d+/\d+)\s+(\S.*)")
_ATOM = r"(?:\d+(?:\.\d*)?|\d*\\pi|\d*\\sqrt\{[^{}]*\}|\d*[A-Za-z])"
_VARIABLE = re.compile(r"([A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?|')?(?:\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))\s*(?=\S)")


def normalised(answer: str) -> str:
    """The answer's normal form."""
    return trace(answer)[-1][1]


def trace(answer: str) -> list[tuple[str, str]]:
    """Every step that changed the text, by name, with the text after it; the first entry is the answer itself."""
    steps = [("as written", answer)]
    for name, step in STEPS:
        text = step(steps[-1][1])
        if text != steps[-1][1]:
            steps.append((name, text))
    return steps


def _symbols(text: str) -> str:
    return unicodedata.normalize("NFKC", text.translate(_TRANSLATION)).strip()


def _marks(text: str) -> str:
    """Without the signs that open and close mathematics, emphasis, currency and a final full stop."""
    text = re.sub(r"(?<!\\)\\[\[\]()]|\*\*|`|\$\$", " ", text).replace(r"\$", "").replace("$", "")
    return re.sub(r"[\s.,;:]+$", "", text.strip()).strip('"')


def _fonts(text: str) -> str:
    text = _ALIAS.sub(lambda found: _ALIASES[found[0]], text)
    text = re.sub(r"\\text\s*\{", r"\\text{", _FONTS.sub(r"\\text", text))
    text = re.sub(r"\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]", r"\\\\", text)
    return re.sub(r"\\(begin|end)\s*\{[bB]?(?:small)?matrix\}", r"\\\1{pmatrix}", text)


def _text_units(text: str) -> str:
    """Without upright text after a number or symbol; text in other places loses its font alone."""
    while (found := _TEXT_UNIT.search(text)) and found[1].strip() not in {"and", "or", "e", "i"}:
        text = text[: found.start()].rstrip()
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text)


def _spacing(text: str) -> str:
    text = re.sub(r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3})", "", text)
    text = _SIZES.sub("", text)
    return " ".join(_SPACING.sub(" ", text).split())


def _signs(text: str) -> str:
    """Without degrees and percent signs."""
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})(?![A-Za-z])", "", text)
    return re.sub(r"\s*\\?%", "", text).strip()


def _words(text: str) -> str:
    """Without words around a number; “and” and “or” between answers become commas."""
    text = re.sub(r"(?i)^(?:approximately|about|around|exactly|only)\s+", "", text)
    text = re.sub(r"(?i),?\s+(?:and|or)\s+(?=[-+\\\w({.])", ", ", text) if re.search(r"\d|\\", text) else text
    text = re.sub(r"(?i)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(r"(?i)(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty", text)
    glued = re.sub(r"(?<=\d)(?=([A-Za-z]+)(?:\^\d)?$)", lambda found: " " if found[1].lower() in _UNITS else "", text)
    found = _NUMBER_AND_WORDS.fullmatch(glued)
    return found[1] if found and all(_is_unit(word) for word in found[2].split()) else text


def _is_unit(word: str) -> bool:
    bare = re.sub(r"\^\{?-?\d\}?$", "", word).rstrip(".,").lower()
    return bare in _UNITS | _SMALL_WORDS or (len(bare) > 3 and bare.replace("-", "").isalpha())


def _thousands(text: str) -> str:
    """Without separators of thousands, except where a comma stands inside brackets."""
    return _outside_brackets(
        text, lambda part: re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda n: n[0].replace(",", ""), part)
    )


def _roots(text: str) -> str:
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"\\sqrt\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text)


def _fractions(text: str) -> str:
    """Every fraction as \\frac{a}{b} with its sign in front, and mixed numbers as one fraction."""
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*([A-Za-z\d])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([A-Za-z\d])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}", r"\\frac{\1}{\2}", text)
    text = re.sub(rf"(?<![\w}}^/.])({_ATOM})\s*/\s*({_ATOM})(?![\w/^{{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<![\d}])\(\s*(-?\d+)\s*\)\s*/\s*\(\s*(\d+)\s*\)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<![\w}])(?:\+\s*)?\\frac\{-([^{}+-]*)\}\{([^{}]*)\}", r"-\\frac{\1}{\2}", text)
    text = re.sub(r"(?<![\w}])(?:\+\s*)?\\frac\{([^{}]*)\}\{-([^{}+-]*)\}", r"-\\frac{\1}{\2}", text)
    return re.sub(r"(?<![\w}.^_])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", _mixed, text)


def _mixed(found: re.Match[str]) -> str:
    whole, above, below = (int(found[n]) for n in (1, 2, 3))
    return rf"\frac{{{whole * below + above}}}{{{below}}}" if above < below else found[0]


def _worked_out(text: str) -> str:
    """The right side of a chain that works numbers out (5 + 3 = 8, or x = 5 + 3 = 8); other equations stay whole."""
    *before, last = text.split("=")
    numbers = [re.sub(r"\\(?:times|cdot|div|frac|sqrt|pi)(?![A-Za-z])", "", side) for side in before]
    if numbers and last.strip() and _VARIABLE.match(f"{before[0]}=0"):
        numbers = numbers[1:]
    worked = bool(numbers) and all(re.search(r"\d", side) and not re.search(r"[A-Za-z<>]", side) for side in numbers)
    return last.strip() if worked and last.strip() else text


def _variable(text: str) -> str:
    """Without “x =” or “x ∈” before the answer, or before each part of a list when all name the same variable."""
    parts = _parts(text)
    heads = [_VARIABLE.match(part) for part in parts]
    if not all(heads) or len({head[1] for head in heads if head}) > 1:
        head = heads[0]
        # x = 1, 2: one variable, several values; x = 1, y = 2 is left alone.
        return text[head.end() :] if head and not any("=" in part for part in parts[1:]) else text
    bodies = [part[head.end() :] for part, head in zip(parts, heads) if head]
    return text if any("=" in body for body in bodies) else ", ".join(bodies)


def _braces(text: str) -> str:
    text = re.sub(r"([\^_])\s*\{\s*([A-Za-z\d])\s*\}", r"\1\2", text)
    while re.fullmatch(r"\{[^{}\\]*\}", text):
        text = text[1:-1].strip()
    return text


def _numbers(text: str) -> str:
    """Numbers without a leading plus or zeros, or zeros after the decimals; powers of ten as in 4.5\\times10^{33}."""
    text = re.sub(rf"(?<![\w.])([-+]?{_NUMBER})[eE]([-+]?\d+)(?![\w.])", r"\1\\times10^{\2}", text)
    text = re.sub(rf"(?<![\w.])([-+]?{_NUMBER})\s*(?:\\cdot|\*|x)\s*10\s*\^", r"\1\\times10^", text)
    text = re.sub(r"10\s*\^\s*\{?\s*\+?(-?)\s*0*(\d+)\s*\}?", r"10^{\1\2}", text)
    text = re.sub(r"10\^\{(\d)\}", r"10^\1", text)
    text = re.sub(rf"(?<![\w.\\]){_NUMBER}(?![\d.])", _plain_number, text)
    return re.sub(r"(^|[({\[,]\s*)\+\s*", r"\1", text)


def _plain_number(found: re.Match[str]) -> str:
    whole, _, decimals = found[0].partition(".")
    decimals = decimals.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{decimals}" if decimals else "")


def _tight(text: str) -> str:
    """No white space, except in answers that are words and where a space ends a command before a letter."""
    if _WORDS.fullmatch(text):
        return text
    return re.sub(r"\s+", "", re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\0", text)).replace("\0", " ")


def _order(text: str) -> str:
    """Sets and lists without brackets in one order."""
    inside = re.fullmatch(r"\\\{(.*)\\\}", text)
    parts = _parts(inside[1] if inside else text)
    if len(parts) < 2 or not all(parts) or "=" in text:
        return text
    listed = ",".join(sorted(parts))
    return rf"\{{{listed}\}}" if inside else listed


def _words_alone(text: str) -> str:
    """Answers that are words in lower case; the letter of an option without brackets."""
    if found := re.fullmatch(r"\(([A-Za-z])\)", text):
        return found[1].upper()
    return text.lower() if _WORDS.fullmatch(text) else text


def _parts(text: str) -> list[str]:
    """The text cut at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth <= 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def _outside_brackets(text: str, change: Callable[[str], str]) -> str:
    pieces, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        if sign in "([{":
            if depth == 0:
                pieces.append(change(text[start:place]))
                start = place
            depth += 1
        elif sign in ")]}":
            depth = max(0, depth - 1)
            if depth == 0:
                pieces.append(text[start : place + 1])
                start = place + 1
    return "".join(pieces) + (change(text[start:]) if depth == 0 else text[start:])


STEPS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("symbols as LaTeX", _symbols),
    ("no marks around it", _marks),
    ("one name for each command", _fonts),
    ("no units in upright text", _text_units),
    ("no spacing commands", _spacing),
    ("no degrees and percent signs", _signs),
    ("no thousands separators", _thousands),
    ("no words around a number", _words),
    ("roots in braces", _roots),
    ("one form of fractions", _fractions),
    ("the end of a calculation", _worked_out),
    ("no variable before it", _variable),
    ("no needless braces", _braces),
    ("one form of numbers", _numbers),
    ("no white space", _tight),
    ("sets and lists in one order", _order),
    ("words in lower case", _words_alone),
)
"""The chain, in order."""
