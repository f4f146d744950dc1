"""The two pictures of the front page, cut from pictures of others: python docs/pictures/front.py; needs Pillow."""

from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
# Left, top, right, bottom, in pixels of the whole picture.
CUTS = {
    "front-mixer.png": ("hydra.png", (766, 896, 1436, 1632)),  # one head of a page of show-mixer
    "front-losses.png": ("recall_matrices.png", (575, 0, 1412, 622)),  # the curves of a comparison
}

for name, (whole, box) in CUTS.items():
    picture = Image.open(HERE / whole).convert("RGB").crop(box)
    picture.quantize(128, method=Image.Quantize.MAXCOVERAGE).save(HERE / name, optimize=True)
