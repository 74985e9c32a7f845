# SPDX-License-Identifier: Apache-2.0
"""What the model writes and what the client must get, as a table; the notation is dialect.py's.

A case is an id, the answer, and what differs from an answer with the reasoning "t", no content and no call. Ids like
A30 are those of the founding list of faults. A prompt opens the reasoning unless `thinks` is false.
"""

from dataclasses import dataclass, field

from .dialect import STRING, TOOLS, tool

ONE = "«calls»\n«f»\n«a=»hello world this is long«/»\n«/f»\n«/calls»"
ONE_CALL = ("f", '{"a": "hello world this is long"}')


@dataclass(frozen=True)
class Case:
    """One answer.

    Attributes:
        id: of the test.
        answer: what the model writes, up to its end-of-sequence token.
        reasoning, content, calls: what the client gets; a call is (name, arguments).
        finish: the finish reason; None is "tool_calls" if there are calls, else "stop".
        request: fields of the chat request besides the tools.
        tools: of the request.
        thinks: the prompt opens the reasoning.
    """

    id: str
    answer: str
    reasoning: str = "t"
    content: str = ""
    calls: tuple = ()
    finish: str | None = None
    request: dict = field(default_factory=dict)
    tools: tuple = TOOLS
    thinks: bool = True

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_calls" if self.calls else "stop")

    @property
    def needs_server(self) -> bool:
        """The engine cuts the answer."""
        return bool(self.request.keys() & {"max_tokens", "stop"})


def call(arguments: str, name: str = "f") -> tuple:
    return ((name, arguments),)


def inside(body: str) -> str:
    """A call of f with this body, in a block, behind the reasoning."""
    return f"t</think>«calls»\n«f»\n{body}\n«/f»\n«/calls»"


NO_THINKING = {"chat_template_kwargs": {"thinking": False}}
CASES = (
    # Plain answers.
    Case("plain", "t</think>words", content="words"),
    Case("plain-without-thinking", "words", "", "words", request=NO_THINKING, thinks=False),
    Case("A29-prose-with-angle-brackets", "t</think>a < b </ c <｜ d <x>", content="a < b </ c <｜ d <x>"),
    Case("A29-emoji", "t</think>你好 🎉👩‍👩‍👧", content="你好 🎉👩‍👩‍👧"),
    Case("empty-reasoning", "</think>words", "", "words"),
    Case("blank-content", "t</think>  \n", content="  \n"),
    Case("content-ends-in-blank-lines", "t</think>a\n\n\n", content="a\n\n\n"),
    Case("reasoning-keeps-its-blanks", " t \n</think>a", " t \n", "a"),
    Case("ends-in-an-angle-bracket", "t</think>a <", content="a <"),
    Case("X03-reasoning-never-ends", "only thought", "only thought"),
    Case("A35-bos-in-content", "t</think>x<｜begin▁of▁sentence｜>y", content="xy"),
    Case(
        "A35-bos-in-content-with-stop-strings",
        "t</think>x<｜begin▁of▁sentence｜>y",
        content="xy",
        request={"stop": ["zzzzz"]},
    ),
    Case("A35-bos-in-reasoning", "a<｜begin▁of▁sentence｜>b</think>c", "ab", "c"),
    Case(
        "A21-json-behind-reasoning",
        't</think>{"a": 1}',
        content='{"a": 1}',
        request={"response_format": {"type": "json_object"}},
    ),
    # Reasoning tags where they do not belong.
    Case("think-opened-again", "<think>t</think>a", content="a"),
    Case("think-closed-twice", "t</think></think>a", content="a"),
    Case("think-named-in-reasoning", "t <think> u</think>a", "t <think> u", "a"),
    Case("think-named-in-content", "t</think>the <think> tag", content="the <think> tag"),
    Case("end-of-think-named-in-content", "t</think>the </think> tag", content="the </think> tag"),
    Case("thinks-although-told-not-to", "<think>t</think>a", content="a", request=NO_THINKING, thinks=False),
    # One call, and the values in it.
    Case("A24-one-call", "t</think>" + ONE, calls=(ONE_CALL,)),
    Case("A41-call-without-block", "t</think>«f»\n«a=»x«/»\n«/f»", calls=call('{"a": "x"}')),
    Case("call-without-reasoning-end", "t" + ONE, calls=(ONE_CALL,)),
    Case("call-without-thinking", ONE, "", calls=(ONE_CALL,), request=NO_THINKING, thinks=False),
    Case("no-parameters", "t</think>«calls»\n«g»\n«/g»\n«/calls»", calls=call("{}", "g")),
    Case("no-blank-between-tags", "t</think>«calls»«f»«a=»x«/»«n:»1«/»«/f»«/calls»", calls=call('{"a": "x", "n": 1}')),
    Case(
        "A29-values",
        inside('«a=»x > y 2>&1«/»\n«n:»5«/»\n«o:»{"x": [1, 2]}«/»'),
        calls=call('{"a": "x > y 2>&1", "n": 5, "o": {"x": [1, 2]}}'),
    ),
    Case(
        "A29-string-to-the-letter",
        inside('«a=» 多行\n\t"q" \\ </b>\n«/»'),
        calls=call('{"a": " 多行\\n\\t\\"q\\" \\\\ </b>\\n"}'),
    ),
    Case(
        "A34-think-tags-in-argument",
        inside("«a=»see <think> and </think> tags«/»"),
        calls=call('{"a": "see <think> and </think> tags"}'),
    ),
    Case("A36-nan-is-no-json", inside("«n:»NaN«/»"), calls=call('{"n": "NaN"}')),
    Case(
        "A36-infinity-inside-an-object", inside('«o:»{"q": Infinity}«/»'), calls=call('{"o": "{\\"q\\": Infinity}"}')
    ),
    Case("A37-null-as-string", inside("«u=»null«/»"), calls=call('{"u": "null"}')),
    Case("A37-number-as-string", inside("«n=»123«/»"), calls=call('{"n": "123"}')),
    Case("number-keeps-its-spelling", inside("«n:»1.50e3«/»"), calls=call('{"n": 1.50e3}')),
    Case("long-number-keeps-its-digits", inside("«n:»" + "7" * 40 + "«/»"), calls=call('{"n": ' + "7" * 40 + "}")),
    Case("X18-json-for-a-string-parameter", inside('«a:»{"k": 5}«/»'), calls=call('{"a": {"k": 5}}')),
    Case("X18-number-for-a-string-parameter", inside("«a:»5«/»"), calls=call('{"a": 5}')),
    Case("bare-word-as-json", inside("«n:»hello«/»"), calls=call('{"n": "hello"}')),
    Case("empty-string", inside("«a=»«/»"), calls=call('{"a": ""}')),
    Case("empty-json", inside("«n:»«/»"), calls=call('{"n": ""}')),
    Case("json-with-blanks-around", inside("«n:» 5\n«/»"), calls=call('{"n": 5}')),
    Case(
        "deeply-nested-json",
        inside("«o:»" + "[" * 400 + "]" * 400 + "«/»"),
        calls=call('{"o": ' + "[" * 400 + "]" * 400 + "}"),
    ),
    Case("json-escapes-are-kept", inside('«o:»{"\\u00e9": "\\/"}«/»'), calls=call('{"o": {"\\u00e9": "\\/"}}')),
    Case(
        "bos-in-argument-is-literal",
        inside("«a=»x<｜begin▁of▁sentence｜>y«/»"),
        calls=call('{"a": "x<｜begin▁of▁sentence｜>y"}'),
    ),
    Case(
        "tags-of-call-and-block-in-argument",
        inside("«a=»«calls» «f» «/f» «/calls» «b=»«/»"),
        calls=call('{"a": "«calls» «f» «/f» «/calls» «b=»"}'),
    ),
    Case(
        "parameter-order-is-kept", inside("«z=»1«/»\n«a=»2«/»\n«m=»3«/»"), calls=call('{"z": "1", "a": "2", "m": "3"}')
    ),
    Case("name-with-quotes-in-json", inside("«a\\=»x«/»"), calls=call('{"a\\\\": "x"}')),
    Case("A31-parameter-given-twice", inside("«a=»x«/»\n«a=»y«/»"), calls=call('{"a": "x", "a": "y"}')),
    Case("A30-wrapped-arguments", inside('«arguments=»{"a": "x", "n": 5}«/»'), calls=call('{"a": "x", "n": 5}')),
    Case("wrapped-arguments-as-json", inside('«input:»{"a": "x"}«/»'), calls=call('{"a": "x"}')),
    Case(
        "wrapped-arguments-of-other-names",
        inside('«arguments=»{"q": 1}«/»'),
        calls=call('{"arguments": "{\\"q\\": 1}"}'),
    ),
    Case(
        "wrapper-with-company",
        inside('«arguments=»{"a": "x"}«/»\n«n:»1«/»'),
        calls=call('{"arguments": "{\\"a\\": \\"x\\"}", "n": 1}'),
    ),
    Case(
        "wrapper-that-the-tool-knows",
        inside('«input=»{"a": 1}«/»'),
        calls=call('{"input": "{\\"a\\": 1}"}'),
        tools=(tool("f", input=STRING),),
    ),
    # Several calls, and text around them.
    Case(
        "two-calls",
        "t</think>«calls»\n«f»\n«a=»x«/»\n«/f»\n«g»\n«/g»\n«/calls»",
        calls=(("f", '{"a": "x"}'), ("g", "{}")),
    ),
    Case(
        "two-blocks",
        "t</think>«calls»\n«g»\n«/g»\n«/calls»\n«calls»\n«f»\n«n:»1«/»\n«/f»\n«/calls»",
        calls=(("g", "{}"), ("f", '{"n": 1}')),
    ),
    Case("A40-blank-lines-belong-to-the-block", "t</think>Sure.\n\n" + ONE, content="Sure.", calls=(ONE_CALL,)),
    Case("blank-content-before-a-block", "t</think>\n \n" + ONE, calls=(ONE_CALL,)),
    Case("third-blank-line-is-content", "t</think>Sure.\n\n\n" + ONE, content="Sure.\n", calls=(ONE_CALL,)),
    Case("X08-text-behind-the-block", "t</think>" + ONE + "\n\nDone.", calls=(ONE_CALL,)),
    Case(
        "X09-unknown-tool", "t</think>«calls»\n«nope»\n«a=»x«/»\n«/nope»\n«/calls»", calls=call('{"a": "x"}', "nope")
    ),
    Case("A26-required", "t</think>" + ONE, calls=(ONE_CALL,), request={"tool_choice": "required"}),
    Case(
        "A26-named",
        "t</think>" + ONE,
        calls=(ONE_CALL,),
        finish="stop",
        request={"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    Case("tool-choice-null-is-auto", "t</think>" + ONE, calls=(ONE_CALL,), request={"tool_choice": None}),
    Case("tool-choice-none", "t</think>Words.\n\n" + ONE, content="Words.", request={"tool_choice": "none"}),
    Case(
        "no-parallel-calls",
        "t</think>«calls»\n«f»\n«a=»x«/»\n«/f»\n«g»\n«/g»\n«/calls»",
        calls=call('{"a": "x"}'),
        request={"parallel_tool_calls": False},
    ),
    Case("markup-without-tools-is-text", "t</think>Like this: " + ONE, content="Like this: " + ONE, tools=()),
    # Markup that is not as it should be.
    Case("A32-empty-block", "t</think>before «calls»\n\n«/calls» after", content="before  after"),
    Case("empty-block-in-reasoning", "t «calls»«/calls» u</think>a", "t  u", "a"),
    Case("A33-stray-closers", "t</think>hello «/» «/f» bye", content="hello   bye"),
    Case("A33-stray-closers-in-reasoning", "t «/» «/f»«/calls» u</think>a", "t   u", "a"),
    Case(
        "A42-block-mentioned",
        "t</think>Write «calls» to open a block, then stop.",
        content="Write «calls» to open a block, then stop.",
    ),
    Case(
        "block-mentioned-with-its-closer",
        "t</think>Put «calls» before and «/calls» behind.",
        content="Put «calls» before and «/calls» behind.",
    ),
    Case("block-mentioned-in-reasoning", "t «calls» u</think>a", "t «calls» u", "a"),
    Case(
        "mention-before-a-call",
        "t</think>I use «calls» now.\n\n" + ONE,
        content="I use «calls» now.",
        calls=(ONE_CALL,),
    ),
    Case(
        "invoke-mentioned",
        "t</think>«f» opens a call of f, «/f» closes it.",
        content="«f» opens a call of f, «/f» closes it.",
    ),
    Case("X06-invoke-in-reasoning", "t «f»\n«a=»x«/»\n«/f» u</think>a", "t «f»\n«a=»x«/»\n«/f» u", "a"),
    Case("parameter-mentioned", "t</think>«a=»x«/» is a parameter", content="«a=»x«/» is a parameter"),
    Case(
        "block-of-prose",
        "t</think>«calls»\nno call in here\n«/calls» after",
        content="«calls»\nno call in here\n«/calls» after",
    ),
    Case("call-of-prose", inside("do it please"), content="«calls»\n«f»\ndo it please\n«/f»\n«/calls»"),
    Case("call-written-as-json", inside('{"a": "x"}'), calls=call('{"a": "x"}')),
    Case("call-written-as-broken-json", inside('{"a": x}'), content='«calls»\n«f»\n{"a": x}\n«/f»\n«/calls»'),
    Case(
        "text-between-parameters",
        inside("«a=»x«/»\nand also\n«n:»1«/»"),
        content="and also\n",
        calls=call('{"a": "x", "n": 1}'),
    ),
    Case(
        "text-between-calls",
        "t</think>«calls»\n«g»\n«/g»\nthen\n«g»\n«/g»\n«/calls»",
        content="then",
        calls=(("g", "{}"), ("g", "{}")),
    ),
    Case("invoke-not-closed", "t</think>«calls»\n«f»\n«a=»x«/»\n«/calls»", calls=call('{"a": "x"}')),
    Case(
        "invoke-not-closed-before-the-next",
        "t</think>«calls»\n«f»\n«a=»x«/»\n«g»\n«/g»\n«/calls»",
        calls=(("f", '{"a": "x"}'), ("g", "{}")),
    ),
    Case("parameter-closed-twice", inside("«a=»x«/»«/»\n«n:»1«/»"), calls=call('{"a": "x", "n": 1}')),
    Case("last-parameter-not-closed", "t</think>«calls»\n«f»\n«a=»x«/f»\n«/calls»", calls=call('{"a": "x"}')),
    Case("block-not-closed", "t</think>«calls»\n«f»\n«a=»x«/»\n«/f»", calls=call('{"a": "x"}')),
    Case(
        "invoke-without-name",
        "t</think>«calls»\n<｜DSML｜ invoke>\n«/f»\n«/calls» after",
        content="«calls»\n<｜DSML｜ invoke>\n\n«/calls» after",
    ),
    Case(
        "A39-blank-before-the-bracket",
        't</think>«calls»\n<｜DSML｜ invoke name="f" >\n«a=»x«/»\n«/f»\n«/calls»',
        calls=call('{"a": "x"}'),
    ),
    Case(
        "no-string-attribute-text",
        inside('<｜DSML｜ parameter name="q">some words</｜DSML｜ parameter>'),
        calls=call('{"q": "some words"}'),
    ),
    Case(
        "no-string-attribute-json",
        inside('<｜DSML｜ parameter name="n">5</｜DSML｜ parameter>'),
        calls=call('{"n": 5}'),
    ),
    Case(
        "no-string-attribute-string-in-the-schema",
        inside('<｜DSML｜ parameter name="a">5</｜DSML｜ parameter>'),
        calls=call('{"a": "5"}'),
    ),
    Case(
        "block-of-another-name",
        "t</think><｜DSML｜toolcalls>\n«f»\n«a=»x«/»\n«/f»\n</｜DSML｜toolcalls>",
        calls=call('{"a": "x"}'),
    ),
    Case(
        "X07-block-of-the-other-version",
        't</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">'
        "x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        calls=call('{"a": "x"}'),
    ),
    # Answers that the engine cuts. One token is one unit of max_tokens.
    Case("cut-in-content", "t</think>one two three", content="one two", finish="length", request={"max_tokens": 4}),
    Case("cut-in-reasoning", "one two three", "one two", finish="length", request={"max_tokens": 2}),
    Case(
        "A22-cut-in-a-string",
        "t</think>«calls»\n«f»\n«a=»" + "word " * 40 + "«/»",
        calls=call('{"a": "' + "word " * 11 + "word"),
        finish="length",
        request={"max_tokens": {"v4": 39, "v41": 36}},
    ),
    Case(
        "A23-stop-string-in-an-argument",
        "t</think>" + ONE,
        calls=call('{"a": "hello world '),
        finish="stop",
        request={"stop": ["this"]},
    ),
    Case(
        "stop-string-between-parameters",
        inside("«a=»x«/»\nHALT\n«n:»1«/»"),
        calls=call('{"a": "x"'),
        finish="stop",
        request={"stop": ["HALT"]},
    ),
    Case("A24-stop-string-is-the-closer", "t</think>" + ONE, calls=(ONE_CALL,), request={"stop": ["«/f»"]}),
    Case("stop-string-is-the-block-closer", "t</think>" + ONE, calls=(ONE_CALL,), request={"stop": ["«/calls»"]}),
    Case("stop-string-in-content", "t</think>one two three", content="one ", request={"stop": ["two"]}),
    Case(
        "A25-cut-in-the-block-opener", "t</think>Hi " + ONE, content="Hi ", finish="length", request={"max_tokens": 6}
    ),
    Case("X10-stop-string-in-reasoning", "one two</think>a", "one ", request={"stop": ["two"]}),
    Case("X14-hidden-reasoning", "t</think>words", "", "words", request={"include_reasoning": False}),
    Case(
        "A20-hidden-reasoning-and-json",
        '{"a": 1}',
        "",
        '{"a": 1}',
        request={"include_reasoning": False, "response_format": {"type": "json_object"}},
    ),
    Case(
        "hidden-reasoning-cut",
        "one two three",
        "",
        "",
        finish="length",
        request={"include_reasoning": False, "max_tokens": 2},
    ),
)
