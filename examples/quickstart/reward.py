"""The quickstart's reward. A reward is a function of the prompt, the response and whatever else the data set holds."""


def sorted_digits(prompt: str, response: str, finish_reason: str, **columns: object) -> float:
    """Return 1 if the response is the prompt's digits in order and then ends, else 0.

    Args:
        prompt: `s`, digits, `=`.
        response: the response's text, without special tokens.
        finish_reason: `"stop"` if the model ended the text itself.
        columns: the data set's other columns; none is needed here.

    >>> sorted_digits("s524310=", "012345", finish_reason="stop")
    1.0
    >>> sorted_digits("s524310=", "012345", finish_reason="length")
    0.0
    """
    wanted = "".join(sorted(prompt[1:-1]))
    return float(response == wanted and finish_reason == "stop")
