"""The one way in which devcluster fails: a message for people, and an exit code."""


class DevclusterError(Exception):
    """The environment is not as needed (exit code 1). The message says what to do."""

    exit_code = 1


class BadArguments(DevclusterError):
    """What was asked for is not possible (exit code 2). The message lists every problem."""

    exit_code = 2
