"""Problems that are known to be flawed: those that the report found behind its difficulty filter, as tests of judges.

The report names six; where it describes one instead of quoting it, a problem of that description stands here.
"""

from __future__ import annotations

from magicrl.pipeline.judging.problems import JudgedProblem

FLAWED: tuple[JudgedProblem, ...] = tuple(
    JudgedProblem(id=name, text=text)
    for name, text in (
        ("flawed/blank", "Five spheres can divide space into ____ parts"),
        ("flawed/missing-options", "Which of the following numbers equals 33 million?"),
        ("flawed/ambiguous", "Which number is greater than 0.7?"),
        ("flawed/label", "Example 27: find sigma_2(28) = ?"),
        (
            "flawed/translation-note",
            "Given that $x + y = 12$ and $x - y = 4$, find $xy$.\n\nTranslate the above text into English, please "
            "retain the original text's line breaks and format, and output the translation result directly.",
        ),
        (
            "flawed/doubled",
            "A cyclist rides 12 km in 40 minutes. What is the speed in km/h?\nA cyclist rides 12 km in 40 minutes. "
            "What is the speed in km/h?",
        ),
    )
)
"""The first four as RECIPE section 12 quotes them; the last two are ours, of the kinds that it describes."""
