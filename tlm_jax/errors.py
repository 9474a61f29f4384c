"""Errors that are the user's to mend, and the exit codes of every command.

A `UserError` reaches the terminal as one line and ends the process with `EXIT_BAD_INPUT`. Anything else that escapes
is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_COMPLETE = 0
EXIT_BAD_INPUT = 2
EXIT_RESUMABLE = 75
EXIT_INTERRUPTED = 130  # Ctrl-C where nothing long was under way
EXIT_BROKEN_PIPE = 141  # the reader of our output went away, as the shell says of any program


class UserError(Exception):
    """Bad input, told in one line: what is wrong, where, and what to do about it.

    Args:
      what: what is wrong, in a clause without a final stop.
      where: the file, line, key, leaf or layer at fault; put first when given.
      mend: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what, self.where, self.mend = what, where, mend
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}; {mend}" if mend else text)


def raise_together(problems: Sequence[UserError]) -> None:
    """Raises all `problems` as one `UserError`, or nothing when there are none.

    Raises:
      UserError: the only problem as it is, or one line that numbers several.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = " ".join(f"({i}) {problem}." for i, problem in enumerate(problems, 1))
        raise UserError(f"{len(problems)} problems: {listed}")
