"""A paragraph of plain English that stands in when the caller gives no text of their own."""

PROSE = (
    "The ferry left the north quay a little after six, while the town was still the colour of wet slate. "
    "Marta stood at the rail with her collar up and counted the lamps along the harbour wall, as her mother had taught "
    "her to do when the sea was rough. There were eleven of them, and the last had been broken since the spring. "
    "Behind her two men argued about the price of barley and whether the new bridge would ever be paid for. "
    "One said that a bridge is a promise made with stone; the other replied that promises were cheaper before the war. "
    "By seven the wind had turned, and the captain sent the boy below to see that the crates of glass were tied. "
    "Nobody spoke of the letter she carried, although everyone on board knew who had written it and why. "
    "She had read it only once, at the kitchen table, with the clock ticking and the kettle slowly coming to the boil. "
    "It said that the house on the island was empty again, that the roof needed work, and that the pear tree had "
    "survived the frost. If she came before the end of the month, the key would be under the third step, where it had "
    "always been. When the first gulls appeared she folded the paper into her glove and began, very quietly, to laugh. "
    "In the afternoon a thin sun broke through, the water turned from grey to green, and the island rose out of the "
    "haze like something remembered: a chapel, a row of low white walls, and smoke from a single chimney."
)
