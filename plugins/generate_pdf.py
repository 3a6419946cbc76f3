"""generate_pdf: writes the text of a job into a PDF file.

Payload
    ``text`` (string, required); ``title`` (one line, up to 200 characters); ``filename`` (a plain name
    without folders, up to 100 bytes). Other keys are left alone.
Result
    ``{"file": absolute path, "pages": number, "bytes": size}``

The file is called ``JOB.pdf``, or ``FILENAME-JOB.pdf``, so two jobs never write the same one and a job
that runs a second time replaces its own: under a temporary name first, then renamed, so nobody sees
half a file. Everything in it depends on the job alone, the date included: a second run gives the same
bytes.

Settings, in ``[plugins.settings.generate_pdf]``
    ``output_dir``  where to write; the environment variable ``PDF_OUTPUT_DIR`` wins. Otherwise ``pdf``
                    below systemd's state directory, else below the user's data directory.
    ``fonts``       list of font files to try first.
    ``on_missing``  ``"discard"`` (default) or ``"replace"``: what to do about characters that no font
                    has. Replacing writes ``?`` for each.

Latin-1 text uses PDF's built-in Helvetica. Anything else needs a font file: those of ``fonts``, then
Open Sans (Latin, Greek, Cyrillic; comes with the ``examples`` extra), then the fonts of the machine.
Several are combined if no single one has all characters. Scripts that are written from right to left or
whose letters change shape also need uharfbuzz (in the same extra).

A payload that can never work is discarded with the field named. What may be better next time (a full
disk, no permission) fails and is retried.
"""

import logging
import os
import re
import stat
import tempfile
import unicodedata
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import aqd

try:
    import fpdf
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed; it comes with: pip install 'aqd[examples]'", name=missing.name
    ) from None

MAX_TITLE = 200
MAX_FILENAME_BYTES = 100
MAX_PAGES = 5000  # a payload of form feeds could ask for a million
LINE_HEIGHT_MM = 6
FONT_FOLDERS = ("/usr/local/share/fonts", "/usr/share/fonts", "~/.local/share/fonts", "~/.fonts")
# Tried before the rest of the machine's fonts, in this order: broad ones, regular faces.
FIRST_FONTS = ("DejaVuSans", "NotoSans-Regular", "FreeSans", "LiberationSans-Regular", "NotoSansCJK-Regular")
OTHER_FACES = re.compile(r"bold|italic|oblique|black|light|thin|medium|condensed|mono", re.IGNORECASE)
MAX_FONTS_TRIED = 400

# What each font file can show. Filled when text first needs it, kept for the life of the worker.
_coverage: dict[str, frozenset[int]] = {}
_settings: dict[str, Any] = {}


@aqd.hookimpl
def aqd_register(handlers: Any) -> None:
    _settings.update(handlers.settings("generate_pdf"))
    if _settings.get("on_missing", "discard") not in ("discard", "replace"):
        raise ValueError('plugins.settings.generate_pdf.on_missing must be "discard" or "replace"')
    fonts = _settings.get("fonts", [])
    if not isinstance(fonts, list) or not all(isinstance(font, str) for font in fonts):
        raise ValueError("plugins.settings.generate_pdf.fonts must be a list of file names")
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every table it subsets
    handlers.add("generate_pdf", generate_pdf, timeout_s=300)


def generate_pdf(payload: Any, job: Any) -> dict[str, Any]:
    text, title, filename = read_payload(payload)
    fonts, text, title = choose_fonts(text, title)
    document = fpdf.FPDF(format="A4")
    try:
        write_document(document, text, title, fonts)
        document.set_creation_date(job.created_at)
        contents = bytes(document.output())
    finally:
        close_fonts(document)
    name = re.sub(r"[^A-Za-z0-9]", "_", job.id)
    path = output_dir() / (f"{filename}-{name}.pdf" if filename else f"{name}.pdf")
    replace_file(path, contents)
    job.logger.info("pdf written", extra={"file": str(path), "pages": document.pages_count})
    return {"file": str(path), "pages": document.pages_count, "bytes": len(contents)}


# --- the payload ----------------------------------------------------------------------------------


def read_payload(payload: Any) -> tuple[str, str, str]:
    """(text, title, filename), cleaned; :class:`aqd.Discard` names the field that is wrong."""
    if not isinstance(payload, dict):
        raise aqd.Discard(f"payload: must be an object with the key 'text', not {type(payload).__name__}")
    if "text" not in payload:
        raise aqd.Discard("payload.text: is missing")
    text = clean("text", payload["text"])
    title = clean("title", payload.get("title") or "")
    title = " ".join(title.split())
    if len(title) > MAX_TITLE:
        raise aqd.Discard(f"payload.title: has {len(title)} characters, the bound is {MAX_TITLE}")
    return text, title, check_filename(payload.get("filename") or "")


def clean(field: str, value: Any) -> str:
    """``value`` in composed form, with ``\\n`` for every kind of line end and without control characters."""
    if not isinstance(value, str):
        raise aqd.Discard(f"payload.{field}: must be a string, not {type(value).__name__}")
    text = unicodedata.normalize("NFC", value)
    text = re.sub(r"\r\n|[\r\x0b\x85\u2028\u2029]", "\n", text).expandtabs(4)
    if re.search(r"[\ud800-\udfff]", text):
        raise aqd.Discard(f"payload.{field}: contains half a surrogate pair, which is no character")
    return re.sub(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]", "", text)


def check_filename(filename: Any) -> str:
    """``filename`` without ``.pdf``, if it is harmless as the beginning of a file's name."""
    if not isinstance(filename, str):
        raise aqd.Discard(f"payload.filename: must be a string, not {type(filename).__name__}")
    name: str = filename.removesuffix(".pdf")
    if re.search(r"[/\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", name):
        raise aqd.Discard("payload.filename: must be a plain name, without folders and control characters")
    if name.startswith((".", "-", " ")) or name != name.strip():
        raise aqd.Discard("payload.filename: must not begin with '.', '-' or a space, nor end with a space")
    size = len(name.encode())
    if size > MAX_FILENAME_BYTES:
        raise aqd.Discard(f"payload.filename: has {size} bytes, the bound is {MAX_FILENAME_BYTES}")
    return name


# --- the page -------------------------------------------------------------------------------------


def write_document(document: Any, text: str, title: str, fonts: list[str]) -> None:
    """Put all of the text into ``document``. ``fonts`` empty: the built-in Helvetica."""
    document.alias_nb_pages("")  # or the text "{nb}" would turn into the number of pages
    document.set_producer("aqd")
    document.set_margins(20, 20)
    document.set_auto_page_break(True, margin=20)
    names = ["helvetica"]
    if fonts:
        names = [f"font{number}" for number in range(len(fonts))]
        for name, path in zip(names, fonts, strict=True):
            document.add_font(name, "", path)
        document.set_fallback_fonts(names[1:], exact_match=False)
    if needs_shaping(text + title):
        document.set_text_shaping(True)
    document.add_page()
    if title:
        document.set_title(title)
        document.set_font(names[0], size=16)
        write_line(document, title, 9)
        document.ln(4)
    document.set_font(names[0], size=11)
    for number, sheet in enumerate(text.split("\f")):
        if number:
            document.add_page()
        for line in sheet.split("\n"):
            write_line(document, line, LINE_HEIGHT_MM)
            if document.pages_count > MAX_PAGES:
                raise aqd.Discard(f"payload.text: needs more than {MAX_PAGES} pages")


def close_fonts(document: Any) -> None:
    """fpdf2 leaves font files open until the garbage collector comes by."""
    for font in document.fonts.values():
        if hasattr(font, "ttfont"):
            font.ttfont.close()


def write_line(document: Any, line: str, height: float) -> None:
    if line.strip():
        align = "R" if is_right_to_left(line) else "L"
        document.multi_cell(0, height, line, align=align, new_x="LMARGIN", new_y="NEXT")
    else:
        document.ln(height)


def is_right_to_left(line: str) -> bool:
    """By the first letter that has a direction, as Unicode's bidirectional algorithm does (UAX 9, P2)."""
    for character in line:
        direction = unicodedata.bidirectional(character)
        if direction in ("L", "R", "AL"):
            return direction != "L"
    return False


def needs_shaping(text: str) -> bool:
    """True for right-to-left scripts and for those of India and south-east Asia whose letters combine."""
    return any(
        unicodedata.bidirectional(character) in ("R", "AL")
        or "\u0900" <= character <= "\u109f"
        or "\u1780" <= character <= "\u17ff"
        for character in set(text)
    )


# --- fonts ----------------------------------------------------------------------------------------


def choose_fonts(text: str, title: str) -> tuple[list[str], str, str]:
    """The font files to use (none for plain Latin-1), and both texts without what cannot be shown."""
    # A dictionary keeps the order, so that the error names characters in the order of the text.
    needed = dict.fromkeys(c for c in title + text if c not in "\n\f")
    if all(ord(character) < 256 for character in needed):
        return [], text, title
    if needs_shaping(text + title) and find_spec("uharfbuzz") is None:
        raise aqd.Discard(
            "payload.text: has a script that needs text shaping, and uharfbuzz is not installed: "
            "pip install 'aqd[examples]'"
        )
    fonts, missing = combine(list(needed))
    swap: dict[int, str] = {}
    lost: list[str] = []
    for character in missing:
        if is_invisible(character):
            swap[ord(character)] = ""
        elif unicodedata.category(character) == "Zs":
            swap[ord(character)] = " "
        else:
            lost.append(character)
    if lost and _settings.get("on_missing", "discard") == "discard":
        shown = ", ".join(f"{character} (U+{ord(character):04X})" for character in lost[:10])
        field = "text" if lost[0] in text else "title"
        more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
        raise aqd.Discard(
            f"payload.{field}: no font on this machine can show {shown}{more}; install one that can (Debian: "
            "fonts-noto-core, fonts-noto-cjk), or name it in plugins.settings.generate_pdf.fonts"
        )
    swap.update((ord(character), "?") for character in lost)
    return fonts, text.translate(swap), title.translate(swap)


def combine(needed: list[str]) -> tuple[list[str], list[str]]:
    """(fonts, characters that none of them has); one font if one has all, else as few as it takes.

    Characters without a picture (spaces, joiners) are no reason to take another font.
    """
    visible = {ord(c) for c in needed if not is_invisible(c) and unicodedata.category(c) != "Zs"}
    preferred = list(preferred_fonts())
    for path in preferred:
        if visible <= coverage(path):
            return [path], [c for c in needed if ord(c) not in coverage(path)]
    chosen: list[str] = []
    left = visible | {ord("?"), ord(" ")}
    for path in islice(chain(preferred, other_fonts()), MAX_FONTS_TRIED):
        if not left:
            break
        if path not in chosen and left & coverage(path):
            chosen.append(path)
            left -= coverage(path)
    covered: set[int] = set().union(*(coverage(path) for path in chosen))
    return chosen, [character for character in needed if ord(character) not in covered]


def preferred_fonts() -> Iterator[str]:
    for path in _settings.get("fonts", []):
        yield str(Path(path).expanduser())
    spec = find_spec("ttf_opensans")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        yield os.path.join(place, "ttf", "OpenSans-Regular.ttf")
    found = {Path(path).stem: path for path in sorted(machine_fonts(), reverse=True)}
    for stem in FIRST_FONTS:
        if stem in found:
            yield found[stem]


def other_fonts() -> Iterator[str]:
    for path in sorted(machine_fonts()):
        if not OTHER_FACES.search(Path(path).stem):
            yield path


def machine_fonts() -> Iterator[str]:
    for folder in FONT_FOLDERS:
        for where, _, names in os.walk(os.path.expanduser(folder)):
            for name in names:
                if name.lower().endswith((".ttf", ".otf", ".ttc")):
                    yield os.path.join(where, name)


def coverage(path: str) -> frozenset[int]:
    """The characters that a font file has glyphs for; none if fpdf2 cannot use the file."""
    known = _coverage.get(path)
    if known is None:
        document = fpdf.FPDF()
        try:
            document.add_font("probe", "", path)
            with TTFont(path, fontNumber=0, lazy=True) as font:
                known = frozenset(font.getBestCmap() or ())
        except Exception:  # a broken file in a font folder must not fail the job
            known = frozenset()
        finally:
            close_fonts(document)
        _coverage[path] = known
    return known


def is_invisible(character: str) -> bool:
    """Joiners, direction marks, variation selectors: leaving them out changes nothing one can see."""
    code = ord(character)
    return (
        unicodedata.category(character) == "Cf"
        or code == 0x34F
        or 0xFE00 <= code <= 0xFE0F
        or 0xE0100 <= code <= 0xE01EF
    )


# --- the file -------------------------------------------------------------------------------------


def output_dir() -> Path:
    """The folder to write into, made if it is not there."""
    configured = os.environ.get("PDF_OUTPUT_DIR") or _settings.get("output_dir")
    if configured:
        folder = Path(configured).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    state = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    for folder in ([Path(state, "pdf")] if state else []) + [Path(data, "aqd", "pdf")]:
        if folder.is_absolute():
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:  # a service user often has no home
                continue
            if os.access(folder, os.W_OK):
                return folder
    return private_temporary_folder()


def private_temporary_folder() -> Path:
    """Below the world-writable /tmp: only if it is really ours, no matter who was here first."""
    folder = Path(tempfile.gettempdir(), f"aqd-pdf-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to somebody else; set PDF_OUTPUT_DIR")
    return folder


def replace_file(path: Path, contents: bytes) -> None:
    """Write ``path`` whole or not at all, durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed in here and had our number
    try:
        with open(temporary, "xb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
