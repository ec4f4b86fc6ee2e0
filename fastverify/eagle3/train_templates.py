"""Message templates of the self-generated EAGLE-3 data: arithmetic, code, chat, instructions, structured text, reports.

Every maker takes a random source and the WordNet words of ``train_prompts.word_lists`` and returns one user message.
"""

from __future__ import annotations

import random

import numpy as np

FOLLOW = [
    "Can you give an example?",
    "Please make it shorter.",
    "Now write it as a bulleted list.",
    "Explain it to a five year old.",
    "Why is that important?",
    "Can you rewrite your answer in a more formal tone?",
    "What are the disadvantages?",
    "Summarize your answer in one sentence.",
    "Can you expand on the second point?",
    "Rephrase your previous answer.",
    "Add a short conclusion.",
    "How would this change in ten years?",
    "Are you sure? Check your answer step by step.",
    "Translate your answer to French.",
    "Write three questions about your answer.",
    "Give me two more alternatives.",
]
NAMES = (
    "Anna Ben Carla David Emma Felix Grace Henry Isla Jack Karen Leo Maria Nathan Olivia Peter Rosa Sam Tina Victor "
    "Wendy Yusuf "
    "Zoe Priya Omar Lucy Martin Elena George Hannah"
).split()
ITEMS = (
    "apples oranges books pencils marbles stickers cookies eggs tickets bottles boxes shirts candles cards flowers "
    "balloons coins "
    "muffins sandwiches toys notebooks stamps shells plants"
).split()
TOPICS = (
    "climate change, renewable energy, artificial intelligence, time management, healthy eating, the water cycle, "
    "photosynthesis, "
    "the French Revolution, remote work, public speaking, electric cars, space travel, social media, personal "
    "finance, meditation, "
    "world history, machine learning, gardening, photography, the stock market, online learning, recycling, sleep, "
    "friendship, "
    "job interviews, travel in Asia, home cooking, musical instruments, chess, climate policy, cyber security, "
    "databases, "
    "the solar system, vaccines, ancient Egypt, customer service, team work, marketing, blockchain, urban planning, "
    "inflation, "
    "supply and demand, gravity, black holes, evolution, poetry, football, basketball, swimming, yoga, coffee, tea, "
    "bread, pets, "
    "dogs, cats, volcanoes, earthquakes, oceans, forests, small business, entrepreneurship, leadership, parenting, "
    "art, museums, "
    "film, theatre, the internet, smartphones, video games, robots, ethics, law, democracy, voting, taxes, health "
    "insurance"
).split(", ")


def math(r: random.Random, w: dict) -> str:
    a, b, c = r.sample(NAMES, 3)
    x, y = r.sample(ITEMS, 2)
    n, m, k, p = r.randint(3, 60), r.randint(2, 20), r.randint(2, 12), r.choice([5, 10, 15, 20, 25, 30, 40, 50])
    return r.choice(
        [
            f"{a} has {n} {x}. {b} gives {a} {m} more {x}, and then {a} gives {k} {x} to {c}. How many {x} does {a} "
            f"have now?",
            f"{a} buys {m} {x} for ${k} each and {k} {y} for ${m} each. How much money does {a} spend in total?",
            f"A store sells {x} for ${n} each. If {a} gets a {p}% discount and buys {m} of them, how much does {a} "
            f"pay?",
            f"{a} reads {n} pages on Monday and {m} times as many pages on Tuesday. How many pages does {a} read in "
            f"the two days?",
            f"{a} works {k} hours a day and earns ${n} an hour. How much does {a} earn in {m} days?",
            f"There are {n * m} {x} in {m} boxes. Each box has the same number of {x}. {a} takes {k} boxes. How many "
            f"{x} does {a} have?",
            f"{a} can run {k} miles in {n} minutes. How long does it take {a} to run {k * m} miles at the same speed?",
            f"{a} is {m} years older than {b}. {b} is twice as old as {c}, who is {k} years old. How old is {a}?",
            f"A farmer has {n} cows and {m} times as many chickens. How many legs do all the animals have together?",
            f"{a} bakes {n} {x}. {a} eats {k}, sells half of the rest for ${m} each, and gives away the remainder. "
            f"How much money does {a} make?",
            f"The ratio of {x} to {y} in a box is {k}:{m}. If there are {(k + m) * n} in total, how many {x} are in "
            f"the box?",
            f"A train travels at {n + 30} miles per hour for {k} hours and then at {n + 10} miles per hour for {m} "
            f"hours. How far does it travel?",
            f"{a} saves ${n} each week. {a} wants to buy a bike that costs ${n * k + m}. How many weeks must {a} save?",
            f"In a class of {n + 10} students, {p}% are girls. How many boys are in the class?",
            f"{a} had ${n + m * k}. After buying {m} {x}, {a} has ${n} left. How much did each of the {x} cost?",
            f"What is {n} times {m} plus {k}?",
            f"Calculate {n * k} divided by {k}, then subtract {m}.",
            f"Solve for x: {k}x + {m} = {k * n + m}.",
            f"What is {p}% of {n * 10}?",
            f"Find the area and the perimeter of a rectangle with length {n} and width {m}.",
            f"If f(x) = {k}x^2 - {m}x + {n}, what is f({r.randint(1, 5)})?",
            f"List the first {m} multiples of {k} and add them up.",
            f"{a} fills a tank with {n * 10} liters of water. It leaks {k} liters an hour. How many liters are left "
            f"after {m} hours?",
            f"Every day {a} feeds {k} {r.choice(['cats', 'dogs', 'horses'])} {m} scoops of food in the morning and "
            f"{k + 1} scoops in the evening. How many scoops does "
            f"{a} use in a week?",
            f"{a}, {b} and {c} share {n * 3} {x}. {a} gets {n - 2}, {b} gets {m} fewer than {a}, and {c} gets the "
            f"rest. How many does {c} get?",
            f"A ticket costs ${k} for children and ${k + m} for adults. A family of {r.randint(2, 4)} adults and "
            f"{r.randint(1, 5)} children buys tickets. How much do they pay?",
        ]
    ) + r.choice(["", "", "", " Show your work.", " Think step by step.", " Give the final answer as a number."])


TASKS = [  # (name, arguments, description, function that computes the doctest)
    (
        "sum_of_squares",
        "numbers",
        "Return the sum of the squares of the numbers in the list.",
        lambda r: ([r.randint(0, 9) for _ in range(4)],),
        lambda a: sum(x * x for x in a),
    ),
    (
        "count_vowels",
        "text",
        "Count how many vowels are in the given string.",
        lambda r: (r.choice(NAMES) + r.choice(ITEMS),),
        lambda s: sum(c in "aeiouAEIOU" for c in s),
    ),
    (
        "reverse_words",
        "text",
        "Return the words of the text in reverse order.",
        lambda r: (" ".join(r.sample(ITEMS, 3)),),
        lambda s: " ".join(s.split()[::-1]),
    ),
    (
        "is_palindrome",
        "text",
        "Return True if the text reads the same forwards and backwards.",
        lambda r: (r.choice(["level", "hello", "noon", "python"]),),
        lambda s: s == s[::-1],
    ),
    (
        "second_largest",
        "numbers",
        "Return the second largest number of a list with at least two distinct elements.",
        lambda r: (r.sample(range(50), 5),),
        lambda a: sorted(a)[-2],
    ),
    (
        "remove_duplicates",
        "items",
        "Remove duplicates from the list and keep the order of the first occurrences.",
        lambda r: ([r.randint(1, 4) for _ in range(6)],),
        lambda a: list(dict.fromkeys(a)),
    ),
    (
        "factorial",
        "n",
        "Return the factorial of a non-negative integer n.",
        lambda r: (r.randint(0, 8),),
        lambda n: int(np.prod(range(1, n + 1), dtype=np.int64)),
    ),
    (
        "fibonacci",
        "n",
        "Return the n-th Fibonacci number, where fibonacci(0) is 0 and fibonacci(1) is 1.",
        lambda r: (r.randint(2, 15),),
        lambda n: [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610][n],
    ),
    (
        "filter_even",
        "numbers",
        "Return only the even numbers of the list.",
        lambda r: (r.sample(range(40), 6),),
        lambda a: [x for x in a if x % 2 == 0],
    ),
    (
        "running_total",
        "numbers",
        "Return a list where element i is the sum of the first i + 1 numbers.",
        lambda r: ([r.randint(1, 9) for _ in range(4)],),
        lambda a: np.cumsum(a).tolist(),
    ),
    (
        "longest_word",
        "words",
        "Return the longest word in the list; the first one if there are several.",
        lambda r: (r.sample(ITEMS, 4),),
        lambda a: max(a, key=len),
    ),
    (
        "char_count",
        "text",
        "Return a dictionary that maps each character to the number of times it occurs.",
        lambda r: (r.choice(["banana", "hello", "noon"]),),
        lambda s: {c: s.count(c) for c in s},
    ),
    (
        "clamp",
        "value, low, high",
        "Limit the value to the range from low to high.",
        lambda r: (r.randint(-20, 40), 0, 20),
        lambda v, a, b: max(a, min(v, b)),
    ),
    (
        "gcd",
        "a, b",
        "Return the greatest common divisor of two positive integers.",
        lambda r: (r.randint(2, 90), r.randint(2, 90)),
        lambda a, b: int(np.gcd(a, b)),
    ),
    (
        "digit_sum",
        "n",
        "Return the sum of the decimal digits of n.",
        lambda r: (r.randint(10, 99999),),
        lambda n: sum(map(int, str(n))),
    ),
    (
        "chunk",
        "items, size",
        "Split the list into consecutive pieces of the given size.",
        lambda r: (list(range(r.randint(4, 9))), r.randint(2, 3)),
        lambda a, k: [a[i : i + k] for i in range(0, len(a), k)],
    ),
    (
        "merge_sorted",
        "a, b",
        "Merge two sorted lists into one sorted list.",
        lambda r: (sorted(r.sample(range(20), 3)), sorted(r.sample(range(20), 3))),
        lambda a, b: sorted(a + b),
    ),
    (
        "is_prime",
        "n",
        "Return True if n is a prime number.",
        lambda r: (r.randint(2, 60),),
        lambda n: n > 1 and all(n % i for i in range(2, n)),
    ),
    (
        "capitalize_all",
        "words",
        "Return the words with their first letters in upper case.",
        lambda r: (r.sample(ITEMS, 3),),
        lambda a: [x.capitalize() for x in a],
    ),
    (
        "transpose",
        "matrix",
        "Return the transpose of a matrix given as a list of rows.",
        lambda r: ([[r.randint(0, 9) for _ in range(3)] for _ in range(2)],),
        lambda m: [list(x) for x in zip(*m)],
    ),
    (
        "average",
        "numbers",
        "Return the arithmetic mean of the numbers, or 0 for an empty list.",
        lambda r: ([r.randint(1, 9) * 4 for _ in range(4)],),
        lambda a: sum(a) / len(a),
    ),
    (
        "to_binary",
        "n",
        "Return the binary representation of n as a string.",
        lambda r: (r.randint(1, 99),),
        lambda n: bin(n)[2:],
    ),
    (
        "common_elements",
        "a, b",
        "Return the sorted elements that are in both lists.",
        lambda r: (r.sample(range(12), 5), r.sample(range(12), 5)),
        lambda a, b: sorted(set(a) & set(b)),
    ),
    (
        "index_of_max",
        "numbers",
        "Return the index of the largest number in the list.",
        lambda r: (r.sample(range(90), 5),),
        lambda a: a.index(max(a)),
    ),
    (
        "starts_with",
        "words, prefix",
        "Return the words that start with the prefix.",
        lambda r: (r.sample(ITEMS, 6), r.choice("abcs")),
        lambda a, p: [x for x in a if x.startswith(p)],
    ),
]


def code(r: random.Random, w: dict) -> str:
    name, args, what, make, run = r.choice(TASKS)
    fn = name if r.random() < 0.5 else r.choice(["my_", "compute_", "get_", "find_", "do_"]) + name
    examples = [make(r) for _ in range(r.randint(1, 3))]
    if r.random() < 0.3:
        lang = r.choice(["Python", "Python", "Python", "JavaScript", "Java", "C++"])
        call = f"{fn}({', '.join(map(repr, examples[0]))})"
        return r.choice(
            [
                f"Write a {lang} function {fn}({args}). {what} For example, {call} should give {run(*examples[0])!r}.",
                f"Implement the following in {lang}: {what}",
                f"{what} Write the code in {lang} and explain how it works.",
                f"What is wrong with this approach to '{what.rstrip('.')}', and how can it be done in {lang} in "
                f"linear time?",
            ]
        )
    typed = r.random() < 0.4
    sig = f"def {fn}({args}):" if not typed else f"def {fn}({args}) -> {type(run(*examples[0])).__name__}:"
    q, lines = r.choice(['"""', "'''"]), []
    style = r.randint(0, 2)
    for e in examples:
        call = f"{fn}({', '.join(map(repr, e))})"
        lines += (
            [f">>> {call}", repr(run(*e))]
            if style == 0
            else [f"{call} == {run(*e)!r}"]
            if style == 1
            else [f"{call} => {run(*e)!r}"]
        )
    doc = "\n    ".join([what] + (["", "Examples:"] if r.random() < 0.4 else []) + lines)
    imports = "from typing import List\n\n\n" if typed and r.random() < 0.5 else ""
    head = r.choice(
        [
            "Complete the code I provided.\n",
            "Complete the code I provided.\n\n",
            "Complete the code I provided.",
            "Complete the following function.\n\n",
            "Finish this Python function:\n",
        ]
    )
    return f"{head}{imports}{sig}\n    {q}{r.choice(['', ' '])}{doc}\n    {q}\n"


def chat(r: random.Random, w: dict) -> str:
    t = r.choice(TOPICS) if r.random() < 0.5 else r.choice(w["noun"])
    u, role = (
        r.choice(TOPICS),
        r.choice("teacher,doctor,lawyer,travel guide,chef,historian,economist,software engineer,poet,coach".split(",")),
    )
    a, b = r.choice(NAMES), r.choice(NAMES)
    return r.choice(
        [
            f"Write a blog post about {t}.",
            f"Compose a short email to {a} about {t}. Keep it polite and to the point.",
            f"Explain {t} in simple terms.",
            f"What are the main advantages and disadvantages of {t}?",
            f"Write a short story about {t}, with {a} and {b} as characters.",
            f"Imagine you are a {role}. How would you explain {t} to a beginner?",
            f"Describe the relation between {t} and {u}.",
            f"Give me five tips about {t}.",
            f"How does {t} work?",
            f"Write a persuasive paragraph about {t}.",
            f"Why do people like {t}?",
            f"Pretend to be a {role} and answer: what should I know about {t}?",
            f"Write a dialogue between {a} and {b} about {t}.",
            f"Draft an outline for an essay on {t}.",
            f"What is the history of {t}?",
            f"Write a poem about {t}.",
            f"Compare {t} and {u}.",
            f"How can I get better at {t}?",
            f"What would happen if there were no {t}?",
            f"Write a product description for something related to {t}.",
            f"I am worried about {t}. What should I do?",
            f"Create a weekly plan to learn about {t}.",
            f"What are common myths about {t}?",
            f"Write a speech of one minute about {t}.",
            f"Tell me something interesting about {t}.",
            f"Can you help me with {t}?",
            f"Write an opening paragraph of a novel in which {t} plays a role.",
            f"Ask me three questions about {t}.",
            f"What do experts say about {t}?",
        ]
    )


def instruct(r: random.Random, w: dict) -> str:
    s, n, adj = r.choice(w["sentence"]), r.choice(w["noun"]), r.choice(w["adj"])
    s = s[0].upper() + s[1:] + ("" if s[-1] in ".?!" else ".")
    k, t = r.randint(3, 10), r.choice(TOPICS)
    return r.choice(
        [
            f"Rewrite this sentence in the passive voice: {s}",
            f"Make this sentence more descriptive: {s}",
            f"Correct the grammar of the sentence: {s.lower()}",
            f"Give {k} examples of things that are {adj}.",
            f"Write a sentence with the word '{n}'.",
            f"List {k} synonyms of the word '{adj}'.",
            f"Classify the sentiment of the sentence as positive, negative or neutral: {s}",
            f"Continue the sentence: {s[: len(s) * 2 // 3]}",
            f"Generate {k} ideas for {t}.",
            f"Create a list of {k} facts about {t}.",
            f"Describe a method for {t}.",
            f"Name {k} things that you need for {t}.",
            f"Write a slogan for {t}.",
            f"Identify the subject and the verb of the sentence: {s}",
            f"Turn this into a question: {s}",
            f"What is the opposite of '{adj}'?",
            f"Suggest a title for a book about {n} and {t}.",
            f"Write a tweet about {t}.",
            f"Create an analogy for {n}.",
            f"Translate into Spanish: {s}",
            f"Translate the sentence to German: {s}",
            f"Write a haiku about {n}.",
            f"Explain why {t} matters to students.",
            f"Summarize the benefits of {t} in {k} bullet points.",
            f"Find the adjectives in this sentence: {s}",
            f"Design a quiz with {k} questions about {t}.",
            f"Write a review of a {adj} {n}.",
            f"Edit the following text so that it is easier to read: {s}",
            f"Put these words in alphabetical order: {', '.join(r.sample(w['noun'], 5))}.",
            f"Pick the odd one out and explain: {', '.join(r.sample(w['noun'], 4))}.",
            f"Describe the character of {r.choice(NAMES)}, who is {adj}.",
        ]
    )


def structured(r: random.Random, w: dict) -> str:
    a, b = r.sample(NAMES, 2)
    x, n, m = r.choice(ITEMS), r.randint(1, 90), r.randint(18, 80)
    row = (
        f"{a}, age {m}, bought {n} {x} on {r.randint(1, 28)} {r.choice(['January', 'March', 'June', 'October'])} "
        f"for ${n * 3}."
    )
    row2 = f"{b}, age {m - 3}, bought {n + 4} {r.choice(ITEMS)} for ${n * 5}."
    return r.choice(
        [
            f"Extract the name, age and item from the text as JSON: {row}",
            f"Convert to a table with the columns name, age and amount: {row} {row2}",
            f"Write the following as a CSV file: {row} {row2}",
            f"Turn the data into a JSON list: {row} {row2}",
            f"Write an SQL query that finds all customers who bought {x}.",
            f"Write an HTML page with a list of {', '.join(r.sample(ITEMS, 4))}.",
            f"Given the table\nname | {x}\n{a} | {n}\n{b} | {m}\nwho has more {x}, and how many in total?",
            f"Write a regular expression that matches "
            f"{r.choice(['a date', 'an email address', 'a phone number', 'a hex colour', 'a postal code'])}.",
            f"Write a YAML configuration for a service named {a.lower()} with {n} workers and port {8000 + n}.",
            f"Sort these numbers from small to large: {', '.join(str(r.randint(1, 99)) for _ in range(7))}.",
            f"Create a shopping list in Markdown with {', '.join(r.sample(ITEMS, 5))} and their prices.",
            f"Extract all numbers from the text: {row} {row2}",
        ]
    )


def report(r: random.Random, w: dict) -> str:
    """A made-up news item of a few sentences: gives summarisation its usual style without using anyone's news text."""
    a, b = r.sample(NAMES, 2)
    place = r.choice(w["place"])[0]
    x, y = r.choice(w["noun"]), r.choice(TOPICS)
    n = r.randint(3, 900)
    s = [
        f"{a} {r.choice(w['person'])[0].split(' ')[-1]}, {r.randint(19, 80)}, from {place}, has been praised after a "
        f"campaign about {y} reached {n} people.",
        f"The group said on {r.choice(['Monday', 'Tuesday', 'Friday', 'Sunday'])} that the number of people who use a "
        f"{x} rose by {r.randint(2, 60)} per cent in a year.",
        f"'We never expected this,' {a} said. 'It began with a {x} and a small idea about {y}.'",
        f"Officials in {place} are now looking at whether the plan, which cost ${n},000, can be used in other cities.",
        f"Critics, among them {b}, warned that {y} needs more than good will.",
        f"A spokesman said: 'We take {y} very seriously and are working with local people.'",
        f"The {x} was first shown at a meeting in {r.choice(w['place'])[0]} in {r.randint(1950, 2015)}.",
        f"More than {n * 7} visitors came to see it last summer, according to a report.",
        f"{b}, a mother of {r.randint(2, 5)}, said that her family had waited for {r.randint(2, 20)} years.",
        f"The case continues, and a decision is expected in {r.choice(['May', 'August', 'November'])}.",
    ]
    s += [e[0].upper() + e[1:] + "." for e in r.sample(w["sentence"], 3)]
    body = s[1:]
    r.shuffle(body)
    return " ".join([s[0]] + body[: r.randint(3, len(body))])
