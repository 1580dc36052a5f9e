//! Holds all pages of the arena, with the table of their expected content.

use crate::content::{Content, Kind, Random, mixed};
use crate::page::{Mismatch, Page};
use std::sync::{Mutex, MutexGuard, PoisonError};

const STRIPE_PAGES: usize = 64;

/// The arena's pages. The versions are stored apart from the pages, so that a page that went back
/// in time is detected.
pub(crate) struct Pages {
    stripes: Vec<Mutex<Stripe>>,
    count: usize,
    content: Content,
    seed: u64,
}

struct Stripe {
    pages: Box<[Page]>,
    versions: Box<[u32]>,
}

/// A page with wrong content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) page: usize,
    pub(crate) mismatch: Mismatch,
}

impl Pages {
    /// Fills `count` pages.
    pub(crate) fn new(count: usize, content: Content, seed: u64) -> Self {
        let stripe = || Stripe {
            pages: vec![Page::ZERO; STRIPE_PAGES].into_boxed_slice(),
            versions: vec![0; STRIPE_PAGES].into_boxed_slice(),
        };
        let stripes = (0..count.div_ceil(STRIPE_PAGES))
            .map(|_| Mutex::new(stripe()))
            .collect();
        let pages = Self {
            stripes,
            count,
            content,
            seed,
        };
        for index in 0..count {
            let kind = pages.kind(index);
            if kind.is_original() {
                let mut stripe = pages.stripe(index);
                stripe.pages[index % STRIPE_PAGES].create(index as u32, seed, kind);
            }
        }
        for index in (0..count).filter(|index| pages.kind(*index) == Kind::Copy) {
            pages.copy(index);
        }
        pages
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Checks a page, then writes it again (a copy: copies it again). Returns `Ok(false)` where the
    /// page at `index` stays zero forever.
    pub(crate) fn write(
        &self,
        index: usize,
        write_bytes: usize,
        random: &mut Random,
    ) -> Result<bool, Fault> {
        let kind = self.kind(index);
        match kind {
            Kind::Zero => return Ok(false),
            Kind::Copy => {
                self.verify(index)?;
                self.copy(index);
            }
            Kind::Random | Kind::Text => {
                let mut stripe = self.stripe(index);
                self.check(&stripe, index)?;
                let slot = index % STRIPE_PAGES;
                let version = stripe.versions[slot].wrapping_add(1);
                stripe.pages[slot].rewrite(version, kind, write_bytes, random);
                stripe.versions[slot] = version;
            }
        }
        Ok(true)
    }

    /// Checks the page at `index`.
    pub(crate) fn verify(&self, index: usize) -> Result<(), Fault> {
        self.check(&self.stripe(index), index)
    }

    fn kind(&self, index: usize) -> Kind {
        self.content.kind(self.seed, index)
    }

    fn check(&self, stripe: &Stripe, index: usize) -> Result<(), Fault> {
        let slot = index % STRIPE_PAGES;
        let (page, version) = (&stripe.pages[slot], stripe.versions[slot]);
        let result = match self.kind(index) {
            Kind::Zero => page.check_zero(),
            Kind::Copy => match self.original_of(index) {
                Some(original) => page.check(original as u32, version, self.seed),
                None => page.check_zero(),
            },
            Kind::Random | Kind::Text => page.check(index as u32, version, self.seed),
        };
        result.map_err(|mismatch| Fault {
            page: index,
            mismatch,
        })
    }

    /// Copies the original's bytes and version; never locks two stripes at once.
    fn copy(&self, index: usize) {
        let Some(original) = self.original_of(index) else {
            return;
        };
        let (page, version) = {
            let stripe = self.stripe(original);
            let slot = original % STRIPE_PAGES;
            (stripe.pages[slot].clone(), stripe.versions[slot])
        };
        let mut stripe = self.stripe(index);
        stripe.pages[index % STRIPE_PAGES] = page;
        stripe.versions[index % STRIPE_PAGES] = version;
    }

    /// Returns the original of the page `index`; `None` where the arena has no page with content of
    /// its own.
    fn original_of(&self, index: usize) -> Option<usize> {
        let start = (mixed(index as u64 ^ self.seed.rotate_left(17)) % self.count as u64) as usize;
        (0..self.count)
            .map(|step| (start + step) % self.count)
            .find(|index| self.kind(*index).is_original())
    }

    fn stripe(&self, index: usize) -> MutexGuard<'_, Stripe> {
        // A stripe is consistent between two calls, so one left by a panic is valid too.
        self.stripes[index / STRIPE_PAGES]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mix() -> Pages {
        Pages::new(1000, Content::Mix, 11)
    }

    fn faults(pages: &Pages) -> Vec<usize> {
        (0..pages.count())
            .filter(|index| pages.verify(*index).is_err())
            .collect()
    }

    #[test]
    fn pages_verify_before_and_after_writes() {
        let pages = mix();
        assert_eq!(faults(&pages), []);
        let mut random = Random::new(1);
        let mut written = 0;
        for _ in 0..5000 {
            let index = random.below(1000);
            written += u32::from(pages.write(index, 512, &mut random).unwrap());
        }
        assert!((4000..4900).contains(&written), "{written}");
        assert_eq!(faults(&pages), []);
    }

    #[test]
    fn a_page_of_the_past_is_found_by_reading_and_by_writing() {
        let pages = mix();
        let index = (0..1000)
            .find(|index| pages.kind(*index).is_original())
            .unwrap();
        let old = pages.stripe(index).pages[index].clone();
        let mut random = Random::new(1);
        pages.write(index, 512, &mut random).unwrap();
        pages.stripe(index).pages[index] = old;
        assert_eq!(faults(&pages), [index]);
        assert_eq!(
            pages.write(index, 512, &mut random).unwrap_err().page,
            index
        );
        assert_eq!(faults(&pages), [index]);
    }

    #[test]
    fn swapped_pages_and_dirt_in_zeros_are_found() {
        let pages = mix();
        let of = |kind| (0..STRIPE_PAGES).filter(move |i| mix().kind(*i) == kind);
        let (zero, copy) = (
            of(Kind::Zero).next().unwrap(),
            of(Kind::Copy).next().unwrap(),
        );
        pages.stripe(0).pages.swap(zero, copy);
        assert_eq!(faults(&pages).len(), 2);
    }
}
