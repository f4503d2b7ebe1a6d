"""What a test raises where there is nothing to compare; tally.py counts it apart, any other run of the tests fails."""


class StockFailsError(RuntimeError):
    """Stock ComfyUI itself does not do what a test needs; the text says what it said."""


class RefusedError(RuntimeError):
    """The pack refuses by name what a test asks for; the text is what the user reads."""
