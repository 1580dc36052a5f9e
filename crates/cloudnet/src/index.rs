//! Finds entries of a cache by fingerprint, in lists of entries whose fingerprints share a prefix.

/// The end of a list.
const NONE: u32 = u32::MAX;

/// A table of lists; each of a fixed number of entries is in one list, or in none.
pub(crate) struct Index {
    heads: Vec<u32>,
    /// Per entry: its fingerprint, the next entry of its list, and whether it is in a list.
    links: Vec<Link>,
}

#[derive(Clone, Copy)]
struct Link {
    fingerprint: u32,
    next: u32,
    listed: bool,
}

const UNLISTED: Link = Link {
    fingerprint: 0,
    next: NONE,
    listed: false,
};

impl Index {
    pub(crate) fn new(entries: usize) -> Self {
        Self {
            heads: vec![NONE; (2 * entries).next_power_of_two()],
            links: vec![UNLISTED; entries],
        }
    }

    pub(crate) fn clear(&mut self) {
        self.heads.fill(NONE);
        self.links.fill(UNLISTED);
    }

    /// Returns the entries with this fingerprint, the newest first.
    pub(crate) fn find(&self, fingerprint: u32) -> impl Iterator<Item = u32> {
        let mut at = self.heads[self.head(fingerprint)];
        std::iter::from_fn(move || {
            while at != NONE {
                let (entry, link) = (at, self.links[at as usize]);
                at = link.next;
                if link.fingerprint == fingerprint {
                    return Some(entry);
                }
            }
            None
        })
    }

    /// Lists an entry under a fingerprint, and removes it from its earlier list.
    pub(crate) fn insert(&mut self, entry: u32, fingerprint: u32) {
        self.remove(entry);
        let head = self.head(fingerprint);
        self.links[entry as usize] = Link {
            fingerprint,
            next: self.heads[head],
            listed: true,
        };
        self.heads[head] = entry;
    }

    /// Removes an entry from its list, if it is in one.
    pub(crate) fn remove(&mut self, entry: u32) {
        let link = std::mem::replace(&mut self.links[entry as usize], UNLISTED);
        if !link.listed {
            return;
        }
        let head = self.head(link.fingerprint);
        if self.heads[head] == entry {
            self.heads[head] = link.next;
            return;
        }
        let mut before = self.heads[head];
        while before != NONE {
            let next = self.links[before as usize].next;
            if next == entry {
                self.links[before as usize].next = link.next;
                return;
            }
            before = next;
        }
    }

    fn head(&self, fingerprint: u32) -> usize {
        fingerprint as usize & (self.heads.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_until_they_are_removed_or_listed_anew() {
        let mut index = Index::new(4);
        let found = |index: &Index, fingerprint| index.find(fingerprint).collect::<Vec<_>>();
        // 3 and 11 share a list of the eight.
        for (entry, fingerprint) in [(0, 3), (1, 11), (2, 3), (3, 5)] {
            index.insert(entry, fingerprint);
        }
        assert_eq!(found(&index, 3), [2, 0]);
        assert_eq!(found(&index, 11), [1]);
        index.insert(0, 5);
        assert_eq!(found(&index, 3), [2]);
        assert_eq!(found(&index, 5), [0, 3]);
        index.remove(1);
        index.remove(1);
        assert_eq!(found(&index, 11), []);
        assert_eq!(found(&index, 3), [2]);
        index.clear();
        assert_eq!(found(&index, 5), []);
    }
}
