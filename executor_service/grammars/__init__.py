"""Grammars of rows: vocabulary, compilation beside the steps, and token masks by llguidance."""

from executor_service.grammars.compiled_grammars import CompiledGrammars, RowGrammar
from executor_service.grammars.compiler import Compiled, GrammarCompiler
from executor_service.grammars.vocabulary import TokenizerUnsupported, Vocabulary, read_token_bytes

__all__ = [
    "Compiled",
    "CompiledGrammars",
    "GrammarCompiler",
    "RowGrammar",
    "TokenizerUnsupported",
    "Vocabulary",
    "read_token_bytes",
]
