"""What the written prompts are about. Written for this project; none of it occurs in the benchmarks."""

from __future__ import annotations

SUBJECTS = (
    "photosynthesis", "how batteries store energy", "the water cycle", "volcanoes", "how the heart works",
    "the Roman Empire", "the French Revolution", "the Silk Road", "the Great Depression", "the Cold War",
    "supply and demand", "compound interest", "how mortgages work", "the stock market", "insurance",
    "climate change", "renewable energy", "recycling plastic", "deforestation", "coral reefs",
    "machine learning", "how search engines work", "encryption", "cloud computing", "computer viruses",
    "binary numbers", "recursion", "how a CPU executes instructions", "databases", "version control",
    "the immune system", "antibiotics", "DNA", "genetic inheritance", "evolution by natural selection",
    "gravity", "electromagnetism", "sound waves", "lenses and mirrors", "the speed of light",
    "the periodic table", "acids and bases", "rust and corrosion", "chemical bonds", "crystals",
    "democracy", "the separation of powers", "human rights", "how laws are made", "taxes",
    "meditation", "stress management", "healthy eating", "strength training", "running a marathon",
    "jazz music", "classical sculpture", "impressionist painting", "film editing", "street photography",
    "Shakespeare's tragedies", "Greek mythology", "the novels of Jane Austen", "haiku", "fairy tales",
    "earthquakes", "glaciers", "hurricanes", "rivers and deltas", "soil erosion",
    "penguins", "elephants", "octopuses", "migrating birds", "ants and their colonies",
    "baking bread", "making cheese", "brewing beer", "growing tomatoes", "composting",
    "learning a foreign language", "time zones", "calendars", "the history of writing", "map projections",
    "bridges", "skyscrapers", "steam engines", "bicycles", "jet engines", "GPS navigation",
    "the solar system", "comets", "galaxies", "space stations", "telescopes",
    "public libraries", "museums", "schools in the nineteenth century", "the postal service", "railways",
    "negotiation", "teamwork", "leadership", "public speaking", "giving feedback",
    "marketing a small business", "writing a business plan", "customer service", "remote teams",
    "freelancing",
    "probability", "prime numbers", "fractions", "the Pythagorean theorem", "statistics in everyday life",
    "friendship", "honesty", "memory", "creativity", "habits", "fear", "curiosity", "patience",
)  # fmt: skip

HEROES = (
    "a clumsy dragon", "a retired astronaut", "a girl who finds an old map", "a talking cat",
    "a detective in a small village", "a lonely robot gardener", "a musician who lost her violin",
    "two brothers on a raft", "an old fisherman and his grandson", "a city under the sea",
    "a time traveller who misses her train", "a young inventor", "a ghost who likes jokes",
    "a wolf who becomes friends with a shepherd", "a postman in the desert", "a queen without a crown",
    "a scientist who discovers a new colour", "a boy who can hear plants", "a pirate who is seasick",
    "a teacher on her first day", "an explorer in the jungle", "a magician whose tricks fail",
    "a painter who paints only doors", "a mouse who wants to fly", "a spaceship with no captain",
    "a knight who refuses to fight", "a family that moves to a farm", "a nurse during a blizzard",
    "a chess champion and her rival", "a shopkeeper who sells dreams",
)  # fmt: skip

GOALS = (
    "learn to play the guitar", "save money every month", "organise a school trip", "train a puppy",
    "write a résumé", "lose weight safely", "clean a kitchen quickly", "paint a bedroom",
    "start a blog", "read more books", "repair a bicycle tyre", "choose a laptop", "grow herbs indoors",
    "improve my handwriting", "give a good presentation", "study for a history test", "pack for a long trip",
    "make a budget", "find a new hobby", "become a morning person", "host a dinner for eight guests",
    "teach a child to swim", "learn to type faster", "move to another city", "care for houseplants",
    "start a podcast", "run a book club", "stay focused while working at home", "cook rice",
    "reduce plastic waste at home", "plan a wedding", "build a simple website", "prepare for a storm",
    "write a cover letter", "apologise to a friend", "deal with a difficult coworker", "adopt a cat",
    "buy a used car", "learn Spanish", "make a short film",
)  # fmt: skip

MAILS = (
    "I ask for a day off next Friday", "I invite the team to lunch", "I apply for a summer internship",
    "I ask a company for a refund", "I remind a customer of an unpaid invoice", "I announce a new schedule",
    "I apologise for missing a meeting", "I ask my bank about a strange charge",
    "I recommend a former student",
    "I thank a host for a lovely evening", "I resign from my job", "I ask a hotel about late arrival",
    "I propose a new project to my manager", "I ask a neighbour to turn down the music",
    "I confirm an appointment with a dentist", "I ask a library to extend a loan",
    "I congratulate a friend on her new job", "I tell parents about a school concert",
    "I ask for feedback on a draft report", "I cancel a subscription",
)  # fmt: skip

FUNCTIONS = (
    "reverses a string", "checks whether a number is prime", "computes the factorial of n",
    "counts the vowels in a text", "merges two sorted lists", "removes duplicates from a list",
    "finds the second largest number", "converts Celsius to Fahrenheit", "validates an e-mail address",
    "parses a date", "computes the Fibonacci numbers", "sorts a list of dictionaries by a key",
    "reads a text file and counts words", "checks for balanced brackets", "flattens a nested list",
    "finds the longest common prefix", "implements binary search", "implements a stack",
    "implements a queue with two stacks", "draws a triangle of stars", "computes the greatest common divisor",
    "rotates a matrix", "generates a random password", "counts how often each letter occurs",
    "checks whether a word is a palindrome", "splits a list into chunks", "formats a number with commas",
    "computes the mean and the median", "downloads a web page", "logs messages to a file",
    "implements a simple calculator", "sums the digits of a number", "transposes a table",
    "finds all files with a given extension", "converts Roman numerals to integers", "implements bubble sort",
    "implements quicksort", "encodes a string as base64", "computes the distance between two points",
    "simulates rolling two dice", "implements a linked list", "traverses a binary tree",
    "caches the results of another function", "retries a request three times", "groups words by length",
    "checks whether two strings are anagrams", "prints a multiplication table", "computes a power without **",
)  # fmt: skip

LANGUAGES = (
    "Python",
    "Python",
    "Python",
    "JavaScript",
    "Java",
    "C++",
    "Go",
    "Rust",
    "TypeScript",
    "C#",
    "Bash",
)

THINGS = (
    "books", "employees", "planets", "recipes", "movies", "students", "products in a shop", "countries",
    "songs", "football players", "hotels", "flights", "sensors", "orders", "animals in a zoo", "cars",
    "museums", "courses", "invoices", "cities", "weather stations", "patients", "pull requests", "tickets",
    "restaurants", "trees", "languages", "inventions", "mountains", "rivers",
)  # fmt: skip

FIELDS = (
    "name, year and price", "id, name and status", "title, author and pages", "name, size and colour",
    "id, date and amount", "name, city and e-mail", "name, category and rating",
    "code, description and count",
    "name, latitude and longitude", "id, tags and created_at",
)  # fmt: skip

PLACES = (
    "Kyoto", "the Sahara", "Iceland", "Paris", "the Amazon", "New York", "Rome", "a small island",
    "the Alps", "Cairo", "a harbour town", "Mumbai", "the Moon", "an old castle", "a rainforest",
    "a night market", "Vienna", "the Grand Canyon", "a village in winter", "a busy airport",
)  # fmt: skip

PAIRS = (
    "summer and winter", "films and novels", "coffee shops and libraries as places to work",
    "renting and buying a house", "Mac and Windows", "running and swimming", "bread and rice",
    "online classes and classroom teaching", "SQL and NoSQL databases", "gold and silver",
    "football and basketball", "lions and tigers", "butter and olive oil", "solar and wind power",
    "credit cards and cash", "mountains and beaches", "introverts and extroverts", "HTTP and HTTPS",
    "a bachelor's and a master's degree", "lists and tuples in Python", "viruses and bacteria",
    "capitalism and socialism", "weather and climate", "speed and velocity", "oil and acrylic paint",
)  # fmt: skip

MATHS = (
    "A shop sells pens at {a} dollars each. How much do {b} pens cost with a discount of {c} percent?",
    "What is {a} plus {b} times {c}?",
    "A train travels {a} kilometres in {b} hours. What is its average speed?",
    "Tom has {a} apples, gives away {c} and buys {b} more. How many does he have now?",
    "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
    "Solve for x: {c}x + {a} = {b}.",
    "If {b} workers need {a} days for a job, how many days do {c} workers need?",
    "What is {c} percent of {a}{b}?",
    "List the first {c} multiples of {b}.",
    "Convert {a} miles to kilometres and explain each step.",
)
