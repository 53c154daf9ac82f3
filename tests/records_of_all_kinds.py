"""Data sets that several tests need."""

from torch.utils.data import Dataset


class Listed(Dataset):
    """A list as a data set."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Fetched(Dataset):
    """Records that are divided by the largest of those that are fetched together."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __getitems__(self, indices):
        found = self.x[indices]
        return list(zip(found / found.abs().max(), self.y[indices], strict=True))
