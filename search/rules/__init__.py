"""Rules as searches use them: the language of terms, conditions, and the rule file."""
