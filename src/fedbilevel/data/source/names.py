"""Names of classes that the files themselves do not tell, or tell in other ways."""

from __future__ import annotations

import string

DIGITS = tuple(string.digits)

CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

_MERGED = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")
"""Digits and letters; the 15 letters whose two cases look alike are one class."""

EMNIST = {
    "balanced": _MERGED,
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "bymerge": _MERGED,
    "digits": DIGITS,
    "letters": tuple(string.ascii_lowercase),
    "mnist": DIGITS,
}

CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

CIFAR100 = (
    *("apple", "aquarium_fish", "baby", "bear", "beaver"),
    *("bed", "bee", "beetle", "bicycle", "bottle"),
    *("bowl", "boy", "bridge", "bus", "butterfly"),
    *("camel", "can", "castle", "caterpillar", "cattle"),
    *("chair", "chimpanzee", "clock", "cloud", "cockroach"),
    *("couch", "crab", "crocodile", "cup", "dinosaur"),
    *("dolphin", "elephant", "flatfish", "forest", "fox"),
    *("girl", "hamster", "house", "kangaroo", "keyboard"),
    *("lamp", "lawn_mower", "leopard", "lion", "lizard"),
    *("lobster", "man", "maple_tree", "motorcycle", "mountain"),
    *("mouse", "mushroom", "oak_tree", "orange", "orchid"),
    *("otter", "palm_tree", "pear", "pickup_truck", "pine_tree"),
    *("plain", "plate", "poppy", "porcupine", "possum"),
    *("rabbit", "raccoon", "ray", "road", "rocket"),
    *("rose", "sea", "seal", "shark", "shrew"),
    *("skunk", "skyscraper", "snail", "snake", "spider"),
    *("squirrel", "streetcar", "sunflower", "sweet_pepper", "table"),
    *("tank", "telephone", "television", "tiger", "tractor"),
    *("train", "trout", "tulip", "turtle", "wardrobe"),
    *("whale", "willow_tree", "wolf", "woman", "worm"),
)
