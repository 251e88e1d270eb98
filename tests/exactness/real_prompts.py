"""Forty prompts of six kinds for the real model."""

from __future__ import annotations

CHAT = (
    "What is the capital of Australia, and why is it not Sydney?",
    "Give me three tips for sleeping better.",
    "Explain recursion to a ten-year-old.",
    "Write a short poem about rain on a tin roof.",
    "Is it safe to eat raw eggs? Answer in two sentences.",
    "Translate 'good morning, my friend' into French, Spanish and German.",
    "Plan a one-day trip to Rome for someone who dislikes museums.",
    "What is 17 times 23? Show the steps.",
)

COPY_HEAVY = (
    "Repeat exactly: the cat sat on the mat, the dog sat on the log, the frog sat on the log.\nthe cat sat "
    "on the mat, the dog sat on the log,",
    "name,age,city\nAnna,31,Berlin\nBob,27,London\nCarla,45,Madrid\n\nname,age,city\nAnna,31,",
    "Original: We will meet on Tuesday at noon in the small room behind the library.\nCopy: We will meet "
    "on Tuesday",
    "1. red green blue\n2. red green blue\n3. red green blue\n4. red green blue\n5. red",
    "To be, or not to be, that is the question. To be, or not to be, that is the question. To be,",
    'Correct the spelling.\nInput: "Ther are too many peple in teh room."\nOutput: "There are too many '
    'people in the room."\nInput: "Ther are too many cars in teh street."\nOutput:',
    "ERROR 404 at /index.html from 10.0.0.1\nERROR 404 at /about.html from 10.0.0.1\nERROR 404 at "
    "/contact.html from 10.0.0.1\nERROR 404 at",
    "do re mi fa sol la ti do re mi fa sol la ti do re mi",
)

CODE = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "SELECT customers.name, SUM(orders.total)\nFROM customers\nJOIN orders ON",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "function debounce(callback, delay) {\n  let timer = null;\n  return function (...args) {\n",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n    let sum: i32 =",
    '<!DOCTYPE html>\n<html>\n<head>\n  <title>Home</title>\n</head>\n<body>\n  <div class="',
    "# Quicksort in Python\ndef quicksort(items):\n    if len(items) <= 1:\n        return items\n    "
    "pivot =",
)

OTHER_LANGUAGES = (
    "Die drei wichtigsten Regeln beim Kochen sind",
    "Il était une fois, dans un petit village au bord de la mer,",
    "La inteligencia artificial es una rama de la informática que",
    "Москва является столицей",
    "日本の首都は東京です。日本で一番高い山は",
    "الذكاء الاصطناعي هو",
    "Το πρώτο πράγμα που πρέπει να κάνεις",
    "भारत की राजधानी",
)

VERY_SHORT = ("A", "The", "1", "\n")

LONG = (
    "The lighthouse at the end of the peninsula had been dark for eleven years when the letter arrived. "
    "Nobody in the village remembered who had last climbed its stairs, although several people claimed "
    "that their fathers had. The letter was addressed to the keeper, and since there was no keeper, the "
    "postman gave it to the baker, who was the only person awake at that hour. It was a short letter, "
    "written in green ink, and it asked for one thing only: that on the night of the autumn equinox the "
    "lamp be lit again, for a single hour, beginning at midnight. No reason was given and no name was "
    "signed. The baker read it twice, folded it into his apron, and went back to his ovens, where forty "
    "loaves were waiting. By noon everybody knew. By evening there were two parties, one of which wanted "
    "to light the lamp, while the other",
    "Minutes of the meeting of the housing cooperative, held on the third of March. Present were eleven of "
    "fourteen members. The chair opened the meeting at seven. Item one: the roof. The treasurer reported "
    "that three offers had been received, of 18,400, 21,950 and 24,300 euros, and that the cheapest did "
    "not include the gutters. After a discussion the members agreed to ask the second company whether it "
    "would do the work before the summer. Item two: the garden. Several members complained about the "
    "hedge, which has not been cut since last spring. It was agreed that the hedge will be cut in April by "
    "volunteers, and that the cooperative pays for the hire of the tools. Item three: bicycles. The cellar "
    "is full, and at least nine bicycles seem to have no owner. All bicycles will be given a tag; whatever "
    "carries no tag by the end of May will be given away. Item four: any other business. The chair thanked "
    "the members and closed the meeting at",
    "Question: A farmer has 12 sheep and 8 goats. He sells a third of the sheep and a quarter of the "
    "goats. How many animals are left? Answer: He sells 4 sheep and 2 goats. 8 sheep and 6 goats are left, "
    "which makes 14 animals.\n\nQuestion: A train leaves at 9:15 and arrives at 11:50. How long does it "
    "travel? Answer: From 9:15 to 11:15 are 2 hours, and from 11:15 to 11:50 are 35 minutes, which makes 2 "
    "hours and 35 minutes.\n\nQuestion: A shirt costs 40 euros. It is reduced by 15 percent. What does it "
    "cost now? Answer: 15 percent of 40 euros are 6 euros. 40 minus 6 are 34 euros.\n\nQuestion: Five "
    "workers build a wall in 6 days. How long do three workers need? Answer: Five workers times 6 days are "
    "30 days of work. 30 divided by 3 are 10 days.\n\nQuestion: A tank holds 300 litres. Water flows in at "
    "20 litres a minute and out at 5 litres a minute. How long until it is full? Answer:",
    "Photosynthesis is the process by which green plants, algae and some bacteria turn light into chemical "
    "energy. In the first stage, light is absorbed by chlorophyll in the thylakoid membranes, water is "
    "split, oxygen is released, and the energy is stored in ATP and NADPH. In the second stage, which does "
    "not need light, carbon dioxide is fixed by the enzyme RuBisCO and reduced to sugar in a series of "
    "reactions known as the Calvin cycle. The rate of photosynthesis depends on the intensity of the "
    "light, on the concentration of carbon dioxide and on the temperature. At low intensities the rate "
    "grows in proportion to the light; at high intensities it levels off, because the enzymes of the "
    "second stage are saturated. Plants of hot and dry regions have ways of concentrating carbon dioxide "
    "around RuBisCO, known as C4 and CAM. In short, the difference between the two stages is that",
)
