"""Grammars of answers: those that requests ask for, and checks that they compile.

Text only, no web.
"""

from splitserve_gateway.grammars.answer_check import AnswerCheck, AnswerFinding
from splitserve_gateway.grammars.answer_plan import AnswerPlan, AnswerRules, plan_answer
from splitserve_gateway.grammars.check_process import CheckProcess
from splitserve_gateway.grammars.checker import (
    ANY_OBJECT,
    CheckedGrammar,
    Gbnf,
    GrammarChecker,
    GrammarRefused,
    RequestedGrammar,
    Source,
    TenantChecker,
    requested_grammar,
)
from splitserve_gateway.grammars.json_schemas import (
    ENFORCED_FORMATS,
    NOT_COMPILED,
    LooserSchema,
    compilable,
    looser,
)
from splitserve_gateway.grammars.tools import ToolUse, tool_use
from splitserve_gateway.grammars.trials import CheckerLimits, GrammarCheckUnavailable

__all__ = [
    "ANY_OBJECT",
    "ENFORCED_FORMATS",
    "NOT_COMPILED",
    "AnswerCheck",
    "AnswerFinding",
    "AnswerPlan",
    "AnswerRules",
    "CheckProcess",
    "CheckedGrammar",
    "CheckerLimits",
    "Gbnf",
    "GrammarCheckUnavailable",
    "GrammarChecker",
    "GrammarRefused",
    "LooserSchema",
    "RequestedGrammar",
    "Source",
    "TenantChecker",
    "ToolUse",
    "compilable",
    "looser",
    "plan_answer",
    "requested_grammar",
    "tool_use",
]
