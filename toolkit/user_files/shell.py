"""Statements of a shell script as words with their lines: enough of the grammar to read launch commands.

Variables that the script itself assigns are expanded; what only the shell can know stays as it is written, and is marked.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from toolkit.user_files.shell_variables import Kind, Variables, Word

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"""[^ \t\r\n\\'"$`<>;&|()]+""")
_ESCAPED = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)
_REDIRECTION = re.compile(r"&?(?:<<<|<<-?|>>|<>|>&|<&|>\||[<>])")
# Words before a command that are no part of it.
_KEYWORDS = frozenset({"then", "do", "!", "time", "exec", "nohup", "command"})
_OPENING: Mapping[str, Kind] = {
    "if": "branches",
    "case": "case",
    "for": "loop",
    "select": "loop",
    "while": "loop",
    "until": "loop",
    "{": "group",
}
_CLOSING: Mapping[str, tuple[Kind, ...]] = {
    "fi": ("branches",),
    "esac": ("case",),
    "done": ("loop",),
    "}": ("group", "function"),
}
# Commands whose words name variables that they set.
_SETTERS = frozenset({"read", "mapfile", "readarray", "getopts", "unset", "printf"})
_BREAKS = "\n;&|()"
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One simple command of a script.

    Args:
        words: Its words, without assignments before it and without redirections.
        environment: Variables exported so far and assigned before the command.
    """

    words: tuple[Word, ...]
    environment: Mapping[str, Word]


@dataclass(slots=True)
class _Reader:
    text: str
    line: int
    variables: Variables
    at: int = 0
    heredocs: list[str] = field(default_factory=list)
    is_joined: bool = False  # by an operator behind which a command must follow, on the next line too
    is_function: bool = False
    brackets: int = 0
    unclosed: tuple[int, str] | None = None  # line and sign of a quote that nothing ends

    def statements(self) -> Iterator[Statement]:
        words: list[Word] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "#":
                self._skip_line()
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] == "\n":
                self._advance(2)
            elif char in " \t\r":
                self._advance(1)
            elif char in "<>" or (char == "&" and self.text[self.at + 1 : self.at + 2] == ">"):
                self._skip_redirection(words)
            elif char in _BREAKS:
                words = self._without_label(char, words)
                array = _ASSIGNMENT.match(words[-1].text) if char == "(" and words else None
                yield from self._finished(words)
                words = []
                if array is not None:
                    self.variables.forget((array.group(1),), self.line)
                self._break(char)
            else:
                words += self._word()
        yield from self._finished(words)

    def _break(self, char: str) -> None:
        """Pass what ends a command, and note what then surrounds the next one."""
        begins = self.text[self.at : self.at + 2]
        if begins == "((":
            length = _closed(self.text, self.at, "(", ")")
            self.variables.calculate(self.text[self.at : self.at + length], self.line)
            self._advance(length)
            return
        if begins == "()":
            self.is_function = True
        elif char == "(":
            self.is_function = False
            self.variables.open("subshell")
        elif char == ")":
            self.variables.close("subshell")
        elif begins == ";;":
            self.variables.next_branch()
        elif begins in ("&&", "||") or char == "|":
            self.is_joined = True
            if self.variables.innermost != "list":
                self.variables.open("list")
        elif not self.is_joined and char in ";&\n":
            self.variables.end_list()
        self._advance(2 if begins in ("&&", "||", ";;", "()") else 1)
        if char == "\n":
            self._skip_heredocs()

    def _structure(self, left: list[Word]) -> None:
        """Take the words from the front that begin, divide or end compound commands."""
        while left:
            word = left[0].text
            if word == "function":
                self.is_function = True
                del left[:1]
            elif word in _OPENING:
                kind = _OPENING[word]
                self.variables.open("function" if kind == "group" and self.is_function else kind)
                self.is_function = False
                if word in ("for", "select"):
                    self.variables.forget((each.text for each in left[1:2]), left[0].line)
                if word in ("for", "select", "case"):
                    left.clear()
            elif word in ("else", "elif"):
                self.variables.next_branch()
            elif word in _CLOSING:
                self.variables.close(*_CLOSING[word])
            elif word not in _KEYWORDS:
                return
            del left[:1]

    def _without_label(self, char: str, words: list[Word]) -> list[Word]:
        """Return the words of a command; none for those before a bracket that nothing opened: a pattern of `case`."""
        if self.text[self.at : self.at + 2] not in ("((", "()"):  # which are passed as one
            self.brackets += (char == "(") - (char == ")")
        if self.brackets >= 0 or (words and words[0].text == "case"):
            self.brackets = max(0, self.brackets)
            return words
        self.brackets = 0
        return []

    def _finished(self, words: list[Word]) -> Iterator[Statement]:
        """Keep the assignments of a statement, and yield it if a command is left."""
        left = list(words)
        self.is_joined = self.is_joined and not words
        self._structure(left)
        own: dict[str, Word] = {}
        exports = bool(left) and left[0].text in ("export", "declare", "readonly", "local", "typeset")
        first = 1 if exports else 0
        kept = left[:first]
        for at, word in enumerate(left[first:], start=first):
            found = _ASSIGNMENT.match(word.text)
            if found is not None:
                own[found.group(1)] = self._assigned(found, word)
            elif exports:
                kept.append(word)
            else:
                kept += left[at:]
                break
        left = kept
        if exports:
            self.variables.set(own, exports=True)
            self.variables.export(word.text for word in left[1:])
            return
        if not left:
            self.variables.set(own)
            return
        if left[0].text in _SETTERS:
            self.variables.forget((word.text for word in left[1:] if _NAME.fullmatch(word.text)), left[0].line)
        elif left[0].text == "let":
            self.variables.calculate(" ".join(word.text for word in left[1:]), left[0].line)
        yield Statement(words=tuple(left), environment=self.variables.exported | own)

    def _assigned(self, found: re.Match[str], word: Word) -> Word:
        """Return what a variable holds after an assignment."""
        name, index, adds = found.groups()
        value = Word(text=word.text[found.end() :], line=word.line, is_known=word.is_known)
        if not index and not adds:
            return value
        old = self.variables.get(name)
        if index or old is None or not old.is_known or not value.is_known or value.text.isdigit():
            return Word(text=f"${name}", line=word.line, is_known=False)  # numbers may be added or joined
        return Word(text=old.text + value.text, line=word.line)

    def _word(self) -> list[Word]:
        """Read one word; an unquoted variable of several words makes several."""
        line, known = self.line, True
        parts: list[tuple[str, bool]] = []  # text, and whether blanks in it separate words
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r<>" or char in _BREAKS:
                break
            if char == "\\":
                if self.text[self.at + 1 : self.at + 2] != "\n":
                    parts.append((self.text[self.at + 1 : self.at + 2], False))
                self._advance(2)
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    self.unclosed, end = (self.line, "'"), len(self.text)
                parts.append((self.text[self.at + 1 : end], False))
                self._advance(end + 1 - self.at)
            elif char == '"':
                self._advance(1)
                known &= self._quoted(parts)
            elif char == "$" and (escaped := _ESCAPED.match(self.text, self.at)):
                known = False
                parts.append((escaped.group(), False))
                self._advance(len(escaped.group()))
            elif char in "$`":
                text, sure = self._expansion()
                known &= sure
                parts.append((text, sure))
            else:
                plain = _PLAIN.match(self.text, self.at)
                assert plain is not None
                parts.append((plain.group(), False))
                self._advance(len(plain.group()))
        return [Word(text=text, line=line, is_known=known) for text in _split(parts)]

    def _quoted(self, parts: list[tuple[str, bool]]) -> bool:
        known, line = True, self.line
        parts.append(("", False))
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n'):
                following = self.text[self.at + 1]
                parts.append(("" if following == "\n" else following, False))
                self._advance(2)
            elif char in "$`":
                text, sure = self._expansion()
                known &= sure
                parts.append((text, False))
            else:
                parts.append((char, False))
                self._advance(1)
        if self.at >= len(self.text):
            self.unclosed = (line, '"')
        self._advance(1)
        return known

    def _expansion(self) -> tuple[str, bool]:
        """Read what begins with $ or a backquote; return its text and whether that is what the shell makes of it."""
        start = self.at
        begins = self.text[start + 1 : start + 3]
        if self.text[start] == "`":
            end = self.text.find("`", start + 1)
            self._advance((len(self.text) if end < 0 else end + 1) - start)
            return self.text[start : self.at], False
        if begins == "((":
            end = self.text.find("))", start)
            self._advance((len(self.text) if end < 0 else end + 2) - start)
            value = self._arithmetic(self.text[start + 3 : self.at - 2])
            return (self.text[start : self.at], False) if value is None else (str(value), True)
        if begins.startswith("("):
            self._advance(1 + _closed(self.text, start + 1, "(", ")"))
            return self.text[start : self.at], False
        if begins.startswith("{"):
            self._advance(1 + _closed(self.text, start + 1, "{", "}"))
            name, _, default = self.text[start + 2 : self.at - 1].partition(":-")
            known = self.variables.get(name)
            if known is not None and (known.text or not known.is_known or not default):
                return known.text, known.is_known
            # The variable is empty, or may be set where the script runs; its default is the best that can be known.
            return (default, "$" not in default) if default else (self.text[start : self.at], False)
        found = _NAME.match(self.text, start + 1)
        if found is None:
            self._advance(1 if not begins or begins[0] in " \t\n\"'" else 2)
            return self.text[start : self.at], self.at == start + 1
        self._advance(found.end() - start)
        known = self.variables.get(found.group())
        return (self.text[start : self.at], False) if known is None else (known.text, known.is_known)

    def _arithmetic(self, text: str) -> int | None:
        def value(found: re.Match[str]) -> str:
            known = self.variables.get(found.group().lstrip("$"))
            return known.text if known is not None and known.is_known else found.group()

        try:
            return _computed(
                ast.parse(re.sub(r"\$?[A-Za-z_]\w*", value, text.replace("{", "").replace("}", "")), mode="eval").body
            )
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None

    def _skip_redirection(self, words: list[Word]) -> None:
        found = _REDIRECTION.match(self.text, self.at)
        assert found is not None
        if words and words[-1].text.isdigit() and self.text[self.at - 1].isdigit():
            del words[-1]  # the number of a file descriptor
        self._advance(len(found.group()))
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self._advance(1)
        target = self._word() if self.text[self.at : self.at + 1] not in ("", *_BREAKS) else []
        if found.group().startswith("<<") and found.group() != "<<<" and target:
            self.heredocs.append(target[0].text)

    def _skip_heredocs(self) -> None:
        for end in self.heredocs:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                row = self.text[self.at : stop]
                self._advance(stop + 1 - self.at)
                if row.strip() == end:
                    break
        self.heredocs = []

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self._advance((len(self.text) if end < 0 else end) - self.at)

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count


def statements(text: str, *, line: int = 1, variables: Mapping[str, Word] | None = None) -> Iterator[Statement]:
    """Yield the simple commands of a shell script, in order.

    Args:
        text: The script.
        line: Number of its first line.
        variables: Variables that are known before it starts.
    """
    changed: Mapping[int, frozenset[str]] = {}
    if re.search(r"\b(?:for|while|until|select)\b", text):
        first = _Reader(text=text, line=line, variables=Variables(variables or {}, {}))
        for _ in first.statements():
            pass
        changed = first.variables.changed_in_loops
    yield from _Reader(text=text, line=line, variables=Variables(variables or {}, changed)).statements()


def unclosed_quote(text: str) -> tuple[int, str] | None:
    """Return the line and the sign of a quote that nothing ends; None too where a substitution may have quotes of its own."""
    if re.search(r"[$<]\(|`|<<|\$\{|\(\(", text):
        return None
    reader = _Reader(text=text, line=1, variables=Variables({}, {}))
    for _ in reader.statements():
        pass
    return reader.unclosed


def _split(parts: list[tuple[str, bool]]) -> list[str]:
    words, is_word = [""], False
    for text, separates in parts:
        first, *more = text.split() or [""] if separates else [text]
        words[-1] += first
        words += more
        is_word |= bool(text) or not separates
    return words if is_word else []


def _closed(text: str, start: int, opening: str, closing: str) -> int:
    """Return the length of the text from a bracket up to the one that closes it."""
    depth = 0
    for found in re.compile(f"[{opening}{closing}]").finditer(text, start):
        depth += 1 if found.group() == opening else -1
        if depth == 0:
            return found.end() - start
    return len(text) - start


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError("no arithmetic of whole numbers")
