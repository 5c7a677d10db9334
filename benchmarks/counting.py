"""The reward of ``lora_study.py``: a response is to count upwards and say nothing else."""

from magicrl.records import Problem


def score(problem: Problem, response: str) -> float:
    """The share of its words, of eight at least, that are numbers larger than the number before."""
    del problem
    words, last, rising = response.replace(",", " ").split(), -1, 0
    for word in words:
        if word.isdecimal() and len(word) < 6 and int(word) > last:
            last, rising = int(word), rising + 1
    return rising / max(8, len(words))
