"""Every rule about how ranks share the work has a wrong command line in docs/errors.md that breaks it."""

from tests.support.errors_page import combinations, errors_page


def test_the_page_lists_the_combinations() -> None:
    page = errors_page()
    assert len(combinations()) >= 12
    for title in combinations():
        assert f"| [{title}](#" in page
