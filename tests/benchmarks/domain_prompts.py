"""Prompts of one domain, cooking, made of word lists: a file for the recipe `eagle3_domain`.

    python tests/benchmarks/domain_prompts.py --out FILE [--rows N] [--seed N]

Each question has a dish or an ingredient, and most have an ingredient or a circumstance besides; no row occurs twice.
"""

import argparse
import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

DISHES = ("lentil soup", "pancakes", "vegetable curry", "roast chicken", "risotto", "apple pie", "beef stew",
          "omelette", "fried rice", "tomato sauce", "banana bread", "mushroom pasta", "fish tacos", "potato salad",
          "chocolate cake", "chili", "pizza dough", "noodle soup", "stuffed peppers", "lasagne", "hummus", "meatballs",
          "quiche", "waffles", "garlic bread", "coleslaw", "rice pudding", "spring rolls", "ratatouille", "shortbread")
INGREDIENTS = ("butter", "garlic", "cream", "onions", "eggs", "flour", "lemon", "ginger", "cumin", "cheese", "spinach",
               "carrots", "beans", "yoghurt", "basil", "olive oil", "mustard", "honey", "tofu", "coconut milk")
OCCASIONS = ("in half an hour", "for six people", "without an oven", "for a child", "the day before",
             "on a small budget", "in one pot", "for a picnic", "with little salt", "in a slow cooker")
QUESTIONS = {
    "recipe": "Write a recipe for {dish} {occasion}.",
    "replace": "What can I use in place of {ingredient} in {dish}?",
    "mistake": "My {dish} has too much {ingredient}. What should I do?",
    "shopping": "Make a shopping list for {dish} {occasion}.",
    "serve": "What goes well with {dish} and {ingredient}?",
    "store": "How long does {dish} with {ingredient} keep, and how do I store it?",
    "why": "Why is {ingredient} added to {dish}?",
}
"""Questions by their kind, which is the row's category in the report."""


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Distinct prompts in random order. Raises ValueError if there are not so many."""
    every = sorted({(kind, text.format(dish=dish, ingredient=ingredient, occasion=occasion))
                    for kind, text in QUESTIONS.items()
                    for dish, ingredient, occasion in product(DISHES, INGREDIENTS, OCCASIONS)})
    if not 1 <= count <= len(every):
        raise ValueError(f"rows must lie between 1 and {len(every):,}, got {count}")
    return [{"prompt": prompt, "category": kind} for kind, prompt in random.Random(seed).sample(every, count)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows(given.rows, given.seed)))


if __name__ == "__main__":
    main()
