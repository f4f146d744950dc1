"""The simple model of texts that stands beside trained ones: logistic regression on how often terms occur."""

from collections.abc import Sequence

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline


def fitted_to_terms(texts: Sequence[str], labels: Sequence[str], *, capitals: bool = False) -> Pipeline:
    """Returns logistic regression on TF-IDF of words and pairs of words, of runs of one to six letters where no text
    has a space, fitted to `texts` and their `labels`. capitals: terms that differ in them are two."""
    has_words = any(" " in text for text in texts)  # DNA has none
    terms = {"ngram_range": (1, 2)} if has_words else {"ngram_range": (1, 6), "analyzer": "char"}
    options = {"min_df": 2, "sublinear_tf": True, "max_features": 200_000}
    vectorizer = TfidfVectorizer(lowercase=not capitals, **terms, **options)
    return make_pipeline(vectorizer, LogisticRegression(C=10.0, max_iter=200)).fit(texts, labels)
