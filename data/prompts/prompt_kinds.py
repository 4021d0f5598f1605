"""Kinds of prompts that a target is asked to write.

A target that writes prompts after nothing but its chat template writes those that are commonest in its training data. A
system prompt before the user's turn steers it (Magpie, arXiv:2406.08464, section 2.2): the system prompts here say what
the assistant is for, and the message that a user sends to such an assistant is written next. They do not stay in the
training data: the prompt is answered as if it had come by itself. A target too small to follow them goes on from the
first words of such a message instead, which stay."""

import hashlib
import random
from collections.abc import Sequence

from ...modules import UserError

UNSTEERED = "any"  # The kind that no system prompt asks for
ALL_KINDS = "all"  # Stands for every kind, the unsteered one included
_ASSISTANT = "You are an AI assistant for {}. The user's message {}"
_PURPOSES = {
    "coding": ("programmers", "asks for a short program or for an explanation of a piece of code, and names the "
               "language."),
    "dialogue": ("everyday conversation", "talks about the user's day, plans or feelings and asks for advice."),
    "extraction": ("extracting information", "contains a short text and asks for certain facts in it as a list or as "
                   "JSON."),
    "humanities": ("students of history, philosophy, politics and art", "asks for an explanation, a comparison or a "
                   "discussion of a topic."),
    "math": ("mathematics", "is an exercise with all its numbers: arithmetic, algebra, geometry or probability."),
    "reasoning": ("logic", "is a puzzle or a question about a situation whose answer takes several steps of thought."),
    "retrieval": ("questions about documents", "contains a paragraph and asks a question that the paragraph answers."),
    "rewriting": ("editing", "contains a sentence or a short paragraph and asks to correct it, or to rewrite it in "
                  "another style."),
    "roleplay": ("role play", "asks the assistant to speak as a certain character in a certain situation."),
    "stem": ("science and engineering", "asks how something in physics, chemistry, biology or technology works."),
    "summary": ("summarising", "contains a short text and asks for a summary in one or two sentences."),
    "translation": ("translation", "contains a sentence and asks to translate it from one language into another."),
    "writing": ("writers", "asks for an email, a story, a poem, a description or another short text."),
}
SYSTEM_PROMPTS = {kind: _ASSISTANT.format(*purpose) for kind, purpose in _PURPOSES.items()}  # By kind
OPENINGS = {
    "coding": ("Write Python code that", "Implement a function in Java that", "How do I use",
               "Debug the following code:", "Show me an example of", "Write a Bash script that",
               "Create a class in C++ that", "What is wrong with", "Convert this code from Python to JavaScript:",
               "Write a regular expression that", "In Python, how can I"),
    "dialogue": ("I feel", "Today I", "My best friend", "I have been thinking about", "Hi! I just",
                 "Do you think I should", "My daughter", "Last weekend we", "I can't decide", "How was your",
                 "My boss"),
    "extraction": ("Extract all names and places from the following text:",
                   "List the products with their prices as JSON:", "From the paragraph below, pick out",
                   "Read this email and tell me who", "Which numbers occur in",
                   "Put the facts of this article into a table:", "Classify the following sentences:",
                   "Identify the main events in this text:"),
    "humanities": ("Who was", "Compare the philosophy of", "What caused the", "Discuss the influence of",
                   "Explain how the", "When did the", "What role did", "Give me an overview of the history of",
                   "How did art", "Is it right to", "What are the main arguments for"),
    "math": ("Calculate", "If 5", "Solve the equation", "A store sells", "What is the area of", "Find the value of",
             "Simplify the expression", "A car drives", "In a class of", "Maria has", "Prove that",
             "What is the sum of", "How many different"),
    "reasoning": ("There are four", "Suppose that", "All cats", "Tom is taller than", "You have two",
                  "A man walks into", "Which one does not belong:", "If it rains", "What comes next:", "Yesterday was",
                  "Is it possible that"),
    "retrieval": ("Read the following passage and answer the question.", "According to this article, what",
                  "Answer from the text below:", "Passage:", "Based on the following document,", "Context:"),
    "rewriting": ("Correct the grammar of this sentence:", "Make the following paragraph shorter:", "Rephrase:",
                  "Improve this text:", "Change the following sentence into the passive voice:", "Edit this email:",
                  "Write the following text in simpler words:", "Paraphrase the sentence"),
    "roleplay": ("Speak as", "You are now a", "Let's play a game. You are", "From now on you are",
                 "Answer as if you were", "Take the role of", "Imagine you're", "I want you to act as",
                 "We are in a castle."),
    "stem": ("How do", "Why does", "What happens when", "Explain what", "What are the properties of", "Describe the",
             "What causes", "How is energy", "What is the function of", "How can scientists measure", "Define"),
    "summary": ("Summarize the following text in one sentence:", "Give me the main points of this article:", "TL;DR:",
                "What is the main idea of this paragraph?", "Write a short summary of", "Shorten this report:"),
    "translation": ("Translate into French:", "Translate the following sentence from English to Spanish:",
                    "How do you say", "What does this mean in English:", "Give me the German word for"),
    "writing": ("Write a story about", "Write a song about", "Help me write", "Write a letter to", "Write an essay on",
                "Compose a poem", "Write a blog post about", "Describe a", "Write a dialogue between",
                "Give me a title for", "Continue this story:", "Write an advertisement for"),
}  # Words with which a message of each kind may begin


def named_kinds(names: Sequence[str]) -> tuple[str, ...]:
    """The kinds of a list of names. Raises UserError if it is empty, a name is unknown or occurs twice, or `all` stands
    next to others."""
    known = (*SYSTEM_PROMPTS, UNSTEERED)
    if list(names) == [ALL_KINDS]:
        return known
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise UserError(f"prompts.own_kinds must be one or more different names among {', '.join(known)}, or "
                        f"{ALL_KINDS} alone, got {list(names)}; null writes prompts without a system prompt")
    return tuple(names)


def drawn(kinds: Sequence[str], seed: int, number: int) -> tuple[str, str]:
    """(kind, opening) of prompt `number`, each of its list with equal chance; a pure function of the seed and the
    number. The opening of the unsteered kind is empty."""
    # Each has a stream of its own: the kinds are the same whether openings are given or not.
    seeds = (hashlib.sha256(f"{what} {seed} {number}".encode()).digest() for what in ("kind", "opening"))
    kind_stream, opening_stream = (random.Random(int.from_bytes(one[:8], "little")) for one in seeds)
    kind = kind_stream.choice(kinds)
    return kind, opening_stream.choice(OPENINGS.get(kind, ("",)))
