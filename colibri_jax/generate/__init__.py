"""From a prompt to text: the LanguageModel protocol, sampling, the generation loop and its report."""
