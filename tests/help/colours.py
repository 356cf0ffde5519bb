"""How light a colour is, and how it stands out."""


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def lightness(colour):
    """CIE L*, 0 to 100: what is left of a colour in grey."""
    Y = luminance(colour)
    return 116 * Y ** (1 / 3) - 16 if Y > 0.008856 else 903.3 * Y


def contrast(one, other):
    """WCAG 2: 4.5 is asked of text, 3 of graphics."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
