"""The formats, in the order in which a file is compared with them."""

from __future__ import annotations

from kvindex.foundation.config_errors import nearest
from sim.traces.errors import TraceError
from sim.traces.format import Format
from sim.traces.formats.bailian import BAILIAN
from sim.traces.formats.lmcache import LMCACHE
from sim.traces.formats.load_csv import AZURE, BURSTGPT
from sim.traces.formats.mooncake import CANONICAL, MOONCAKE
from sim.traces.formats.openai_log import OPENAI_LOG
from sim.traces.formats.tokens import TOKENS
from sim.traces.formats.weka import WEKA
from sim.traces.source import TraceSource

FORMATS = {
    format.name: format
    for format in (
        CANONICAL,
        BAILIAN,
        TOKENS,
        MOONCAKE,
        WEKA,
        LMCACHE,
        OPENAI_LOG,
        AZURE,
        BURSTGPT,
    )
}


def named_format(source: TraceSource, name: str) -> Format:
    """Return the format of that name; TraceError lists the names."""
    if name not in FORMATS:
        raise TraceError(source.path, f"unknown format {name!r}{nearest(name, FORMATS)}")
    return FORMATS[name]


def guess_format(source: TraceSource) -> Format:
    """Return the first format that recognises the file's first line; TraceError if none does."""
    number, line = source.first_line()
    for format in FORMATS.values():
        if format.recognises(line):
            return format
    raise TraceError(
        source.path,
        f"no known format begins like this; name it with --format ({', '.join(FORMATS)})",
        line=number,
    )
