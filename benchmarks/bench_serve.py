# SPDX-License-Identifier: Apache-2.0
"""Running servers: how long do clients wait for their tokens, and which of two builds is ahead?

    python benchmarks/bench_serve.py --case NAME --server OURS=URL [--server RIVAL=URL] [--rounds N]
        [--output RECEIPT --scope TEXT] [-- arguments of `vllm bench serve`]

In a round every server gets the same requests, one server at a time, and who begins changes with the round; each
round draws its prompts with a seed of its own. The first round warms up and is not counted. `vllm bench serve` sends
the requests; the receipt keeps when each piece of each stream arrived (one token, or those that one step accepted) and
by how much the server's own counters rose. Acceptance of drafts is told for text, not for drawn tokens. One request
that fails ends the run without a figure.
"""

import argparse
import contextlib
import itertools
import re
import statistics
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import receipt  # noqa: E402
from vllm.ampere.errors import AmpereError, UsageError  # noqa: E402

ANSWER_SECONDS = 30
REPEATABLE = 0.01
# Measure -> unit, and whether more is better.
MEASURES = {
    "ttft": ("ms", False), "step": ("ms", False), "tpot": ("ms/token", False), "rate": ("tokens/s", True),
}  # fmt: skip
DEFAULTS = {"dataset_name": "random", "temperature": 0.0, "disable_tqdm": True}
# Datasets whose prompts are drawn tokens: drafts of such text say nothing about acceptance.
DRAWN = ("random", "random-mm", "prefix_repetition", "timed_trace")
# What the rounds need to decide themselves.
RESERVED = (
    "--base-url", "--host", "--port", "--seed", "--label", "--save-result", "--save-detailed", "--append-result",
    "--result-dir", "--result-filename", "--num-warmups", "--ready-check-timeout-sec", "--plot-timeline",
    "--plot-dataset-stats",
)  # fmt: skip
_DRAFTS, _DRAFTED, _ACCEPTED = (
    f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")
)


@dataclass(frozen=True)
class Stream:
    """One request as its client saw it.

    Attributes:
        start_s: when it was sent, on the client's clock.
        arrivals_s: when each piece arrived, after `start_s`.
        tokens: tokens of all pieces.
        text: their text.
    """

    start_s: float
    arrivals_s: list[float]
    tokens: int
    text: str


@dataclass(frozen=True)
class Round:
    """What one server did in one round; `counters` holds by how much each of its counters rose."""

    duration_s: float
    streams: list[Stream]
    counters: dict[str, float]

    def measures(self) -> dict[str, float]:
        """Medians over the round's requests, and tokens over its duration; a measure without a sample is left out.

        Returns:
            ttft: ms to the first piece; step: ms between two pieces; tpot: ms a token after the first piece;
            rate: tokens a second of all requests together.
        """
        seconds = {
            "ttft": [s.arrivals_s[0] for s in self.streams],
            "step": [b - a for s in self.streams for a, b in itertools.pairwise(s.arrivals_s)],
            "tpot": [(s.arrivals_s[-1] - s.arrivals_s[0]) / (s.tokens - 1) for s in self.streams if s.tokens > 1],
        }
        found = {measure: 1e3 * statistics.median(taken) for measure, taken in seconds.items() if taken}
        return found | {"rate": sum(s.tokens for s in self.streams) / self.duration_s}


def streams(result: dict) -> list[Stream]:
    """The requests of a detailed result of `vllm bench serve`.

    Raises:
        AmpereError: a request failed.
    """
    failed = [error for error in result["errors"] if error]
    if failed or result["completed"] < len(result["ttfts"]):
        reason = failed[0].strip().splitlines()[-1] if failed else "no token came"
        sent = len(result["ttfts"])
        lost = f"{sent - result['completed']} of {sent} requests failed"
        raise AmpereError(f"{lost}: {reason}", "the server's log may say more")
    rows = zip(*(result[name] for name in ("start_times", "ttfts", "itls", "output_lens", "generated_texts")))
    return [
        Stream(start, list(itertools.accumulate([first, *gaps])), tokens, text)
        for start, first, gaps, tokens, text in rows
    ]


def counters(exposition: str) -> dict[str, float]:
    """The server's counters, and the sums and counts of its histograms, added over engines.

    Args:
        exposition: what GET /metrics returns.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if family.type not in ("counter", "histogram") or sample.name.endswith(("_bucket", "_created")):
                continue
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            name = sample.name + "".join(f"{{{k}={v}}}" for k, v in sorted(labels.items()))
            found[name] = found.get(name, 0.0) + sample.value
    return found


def risen(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """By how much the counters that changed did so."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}


def figures(case: str, dataset: str, rounds: dict[str, list[Round]]) -> list[dict]:
    """The figures of a run.

    Args:
        case: middle part of their ids.
        dataset: where the prompts came from; of one in `DRAWN` no acceptance is told.
        rounds: server to its rounds, ours first. `<measure>-vs-<rival>` is the median over the rounds of the ratio
            within a round; above 1, ours is ahead.
    """
    found = []

    def add(measure, value, unit, **more):
        more = {name: float(f"{number:.4g}") for name, number in more.items()}
        found.append({"id": f"serve/{case}/{measure}", "value": float(f"{value:.4g}"), "unit": unit} | more)

    measured = {name: [each.measures() for each in taken] for name, taken in rounds.items()}
    for name, taken in measured.items():
        for measure in taken[0]:
            values = [each[measure] for each in taken]
            add(f"{name}-{measure}", statistics.median(values), MEASURES[measure][0], low=min(values), high=max(values))
        if "step" in taken[0]:
            steps = [each["step"] for each in taken]
            add(f"{name}-step-spread", (max(steps) - min(steps)) / statistics.median(steps), "fraction")
        total = {counter: sum(each.counters.get(counter, 0.0) for each in rounds[name])
                 for counter in (_DRAFTS, _DRAFTED, _ACCEPTED)}  # fmt: skip
        if total[_DRAFTS] and dataset not in DRAWN:
            add(f"{name}-acceptance", total[_ACCEPTED] / total[_DRAFTED], "fraction")
            add(f"{name}-tokens-per-step", 1 + total[_ACCEPTED] / total[_DRAFTS], "tokens")
    ours, *rivals = measured
    for rival in rivals:
        for measure in measured[ours][0]:
            pairs = [(a[measure], b[measure]) for a, b in zip(measured[ours], measured[rival])]
            ratios = [a / b if MEASURES[measure][1] else b / a for a, b in pairs]
            add(f"{measure}-vs-{rival}", statistics.median(ratios), "x", low=min(ratios), high=max(ratios))
    return found


def agreement(rounds: dict[str, list[Round]]) -> str:
    """What the run itself shows of its answers' correctness."""
    said = f"{sum(len(r.streams) for taken in rounds.values() for r in taken)} requests, none failed"
    if len(rounds) == 2:
        pairs = [(a.text, b.text) for ours, rival in zip(*rounds.values()) for a, b in zip(ours.streams, rival.streams)]
        said += f"; {sum(a == b for a, b in pairs)} of {len(pairs)} answers are equal on both servers"
    return said


def fetch(name: str, url: str, path: str) -> str:
    """What a server answers to GET.

    Raises:
        AmpereError: it does not answer, or with another status than 200.
    """
    try:
        with urllib.request.urlopen(url + path, timeout=ANSWER_SECONDS) as answer:
            return answer.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise AmpereError(f"{name}: {url}{path} does not answer: {reason}", "start the server, and name its address")


def parse_requests(words: list[str]) -> argparse.Namespace:
    """The arguments of `vllm bench serve`.

    Raises:
        UsageError: vLLM does not know one.
        AmpereError: vLLM is not installed.
    """
    try:
        from vllm.benchmarks.serve import add_cli_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise AmpereError(f"`vllm bench serve` cannot be imported: {error}", "run it with the Python that has vLLM")

    def refuse(message):
        raise UsageError(f"vllm bench serve: {message}", "`vllm bench serve --help=all` lists its arguments")

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    parser.set_defaults(**DEFAULTS)
    parser.error = refuse
    return parser.parse_args(words)


def run_round(name: str, url: str, requests: argparse.Namespace, seed: int) -> Round:
    """Send one round's requests to one server.

    Raises:
        AmpereError: a request failed, or another client used the server meanwhile.
    """
    from vllm.benchmarks import serve

    asked = argparse.Namespace(**vars(requests))
    asked.base_url, asked.seed, asked.save_detailed, asked.ready_check_timeout_sec = url, seed, True, 0
    before = counters(fetch(name, url, "/metrics"))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = serve.main(asked)
    except Exception as error:  # upstream's: about its arguments or the server, whatever the type
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise AmpereError(f"{name}: {reason}", "`vllm bench serve` with the same arguments says more")
    rose = risen(before, counters(fetch(name, url, "/metrics")))
    try:
        found = Round(result["duration"], streams(result), rose)
    except AmpereError as error:
        raise AmpereError(f"{name}: {error}", error.hint)
    tokens = sum(stream.tokens for stream in found.streams)
    if (generated := rose.get("vllm:generation_tokens_total", 0)) > tokens:
        raise AmpereError(
            f"{name}: the server generated {generated:.0f} tokens, {tokens} of them in this run",
            "measure a server that nobody else uses",
        )
    return found


def run(servers: dict[str, str], requests: argparse.Namespace, rounds: int, seed: int) -> dict[str, list[Round]]:
    """All rounds; server to those that count."""
    names, taken = list(servers), {name: [] for name in servers}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            done = run_round(name, servers[name], requests, seed + number)
            shown = ", ".join(f"{measure} {value:.4g}" for measure, value in done.measures().items())
            print(f"{'round ' + str(number) if number else 'warm-up'}, {name}: {shown}", file=sys.stderr)
            if number:
                taken[name].append(done)
    return taken


def samples(rounds: dict[str, list[Round]]) -> dict:
    """The rounds as a receipt holds them; times in seconds, to a microsecond."""

    def shown(stream):
        arrivals = [round(second, 6) for second in stream.arrivals_s]
        return {"start_s": round(stream.start_s, 6), "arrivals_s": arrivals, "tokens": stream.tokens}

    return {
        name: [
            {"duration_s": each.duration_s, "counters": each.counters, "requests": [shown(s) for s in each.streams]}
            for each in taken
        ]
        for name, taken in rounds.items()
    }


def _server(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"([a-z0-9][a-z0-9-]*)=(https?://\S+?)/*", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, as in ours=http://127.0.0.1:8000")
    return found[1], found[2]


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} has more than small letters, digits, dots and dashes")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds")
    return int(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message, "python benchmarks/bench_serve.py --help")


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our arguments, and behind "--" those of `vllm bench serve`.

    Raises:
        UsageError: the command line is wrong, or sets what each round sets.
    """
    cut = words.index("--") if "--" in words else len(words)
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=_name, required=True, help="middle part of the figures' ids")
    parser.add_argument("--server", type=_server, action="append", required=True, metavar="NAME=URL",
                        help="ours; given twice, ours and its rival (the same one twice shows the noise)")  # fmt: skip
    parser.add_argument("--rounds", type=_count, default=5, help="rounds that count, besides the first")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each round adds one")
    parser.add_argument("--output", type=Path, help="receipt to write")
    parser.add_argument("--scope", help="one sentence for the receipt: which code ran on which card")
    found = parser.parse_args(words[:cut])
    names = [name for name, _ in found.server]
    if len(names) > 2 or len(set(names)) < len(names):
        parser.error("--server: one server, or two with different names")
    if found.output and not found.scope:
        parser.error("--output needs --scope")
    rest = words[cut + 1 :]
    for word in rest:
        if word.partition("=")[0].replace("_", "-") in RESERVED:
            parser.error(f"{word} is set by each round")
    return found, rest


def measure(words: list[str]) -> None:
    arguments, rest = parse(words)
    servers = dict(arguments.server)
    versions = {name: fetch(name, url, "/version") for name, url in servers.items()}
    requests = parse_requests(rest)
    rounds = run(servers, requests, arguments.rounds, arguments.seed)
    found = figures(arguments.case, requests.dataset_name, rounds)
    for figure in found:
        print(f"{figure['value']:>12.6g}  {figure['unit']:<9} {figure['id']}")
    for figure in found:
        if figure["id"].endswith("-step-spread") and figure["value"] > REPEATABLE:
            print(f"warning: {figure['id']}: rounds differ by {figure['value']:.1%}", file=sys.stderr)
    if arguments.output:
        kept = samples(rounds) | {"versions": versions, "dataset": requests.dataset_name}
        receipt.write(arguments.output, "serve", arguments.scope, agreement(rounds), found, kept)


def main() -> int:
    try:
        measure(sys.argv[1:])
    except AmpereError as error:
        print(f"error: {error}", file=sys.stderr)
        print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
