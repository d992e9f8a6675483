"""Texts for bench_speculation: two that repeat what is there, and two that do not."""

from __future__ import annotations

from typing import NamedTuple

from engine.frontend.sampling_params import SamplingParams

_CODE = '''\
def parse_settings(path):
    """Read key=value lines; blank lines and comments are skipped."""
    settings = {}
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if "=" not in line:
                raise ValueError(f"{path}:{number}: expected key=value, found {line!r}")
            key, value = line.split("=", 1)
            settings[key.strip()] = value.strip()
    return settings


def write_settings(path, settings):
    """Write settings as key=value lines, sorted by key."""
    with open(path, "w") as file:
        for key in sorted(settings):
            file.write(f"{key}={settings[key]}\\n")
'''

_REPORT = """\
The harbour of Lindqvist opened in 1874 with two wooden piers and a customs house of red brick. \
Herring boats brought eleven thousand barrels in the first winter, and the price of salt doubled. \
A storm in March 1881 took the northern pier; it was rebuilt in granite from the quarry at Hovde, \
eleven kilometres inland, and carried to the coast on a narrow railway laid for that purpose. \
The railway outlived the fishery: it moved timber until 1932 and tourists from then on.
"""


class Workload(NamedTuple):
    """A prompt, how its continuation is drawn, and the speed-up that is expected."""

    name: str
    prompt: str
    temperature: float
    goal: float

    def sampling(self, num_tokens: int) -> SamplingParams:
        """Return parameters for exactly `num_tokens` tokens."""
        return SamplingParams(
            temperature=self.temperature, max_tokens=num_tokens, ignore_eos=True, seed=1
        )


WORKLOADS = (
    Workload(
        "code edit",
        f"# Original file\n{_CODE}\n# The same file with read_settings in place of parse_settings\n"
        "def read_settings(path):\n",
        temperature=0.0,
        goal=1.5,
    ),
    Workload(
        "retrieval copy",
        f"Document 1:\n{_REPORT}\nDocument 1 says, word for word:\nThe harbour of Lindqvist",
        temperature=0.0,
        goal=1.5,
    ),
    Workload(
        "story, drawn",
        "Once upon a time, in a village that no map showed, a girl found a key. She",
        temperature=1.0,
        goal=0.97,
    ),
    Workload("anything, drawn hot", "zephyr 41 quartz", temperature=2.0, goal=0.97),
)
