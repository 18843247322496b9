"""A reward model's score of a sequence is what transformers' classifier gives for it."""

import pytest
import torch
from torch_train_cases import make_engine

from enginehouse.data import Batch, Ragged
from enginehouse.roles.sequence_scores import VALUES, append_end, row_sums
from enginehouse_testing.models import tiny_model


def test_a_token_more_is_marked_alone():
    rows = append_end(Batch({"input_ids": Ragged.from_list([[4, 5], [6]]), "reward": torch.zeros(2)}))
    assert rows.columns == ("input_ids", "loss_mask")
    assert [row.tolist() for row in rows.ragged("input_ids")] == [[4, 5, 5], [6, 6]]
    assert [row.tolist() for row in rows.ragged("loss_mask")] == [[False, False, True], [False, True]]


@pytest.mark.parametrize("tied", [True, False])
def test_scores_are_the_logits_of_a_sequence_classifier(tmp_path, tied):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model(tied=tied), num_labels=1).eval()
    classifier.save_pretrained(tmp_path)
    rows = [[4, 5, 6, 7], [8], [9, 10, 1]]
    found = make_engine(str(tmp_path), head="value").forward(
        append_end(Batch({"input_ids": Ragged.from_list(rows)})), VALUES
    )
    with torch.no_grad():
        wanted = torch.cat([classifier(input_ids=torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(row_sums(found.ragged("values")).float(), wanted, atol=1e-5, rtol=0)
