//! Chooses few cases that still bring every two properties of a case together.

use super::case::{Case, Kind};
use std::collections::{BTreeMap, HashSet};

/// A small generator whose sequence depends on nothing but its seed (SplitMix64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below a limit, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        (word % limit.max(1) as u64) as usize
    }
}

/// The chosen cases, the most telling first.
#[derive(Debug)]
pub struct Cover {
    /// The cases.
    pub cases: Vec<Case>,
    /// Pairs of properties that they bring together.
    pub covered: usize,
    /// Pairs that there are.
    pub pairs: usize,
}

/// At most so many cases, which together cover as many pairs of properties as a greedy choice can.
/// Where properties leave a choice of points, and of cases, the seed decides.
pub fn pairwise(universe: &[Case], seed: u64, most: usize) -> Cover {
    let mut by_kind: BTreeMap<Kind, Vec<&Case>> = BTreeMap::new();
    for case in universe {
        by_kind.entry(case.kind).or_default().push(case);
    }
    let mut random = Random::new(seed);
    let mut missing: HashSet<Meeting> = by_kind.keys().flat_map(|kind| meetings(*kind)).collect();
    let pairs = missing.len();
    let mut cases = Vec::new();
    while cases.len() < most && !missing.is_empty() {
        let gain = |kind: &Kind| {
            let new = meetings(*kind).into_iter();
            new.filter(|meeting| missing.contains(meeting)).count()
        };
        let best = by_kind.keys().map(gain).max().unwrap_or(0);
        let candidates: Vec<&Kind> = by_kind.keys().filter(|kind| gain(kind) == best).collect();
        let kind = *candidates[random.below(candidates.len())];
        for meeting in meetings(kind) {
            missing.remove(&meeting);
        }
        if let Some(same) = by_kind.get(&kind) {
            cases.push(same[random.below(same.len())].clone());
        }
    }
    Cover {
        cases,
        covered: pairs - missing.len(),
        pairs,
    }
}

/// Two properties by their places, with their values.
type Meeting = ((usize, usize), (usize, usize));

fn meetings(kind: Kind) -> Vec<Meeting> {
    let values = [
        kind.victim as usize,
        kind.step as usize,
        kind.pair as usize,
        kind.release as usize,
        usize::from(kind.locks),
        kind.back as usize,
        kind.disks as usize,
    ];
    let mut meetings = Vec::new();
    for first in 0..values.len() {
        for second in first + 1..values.len() {
            meetings.push(((first, values[first]), (second, values[second])));
        }
    }
    meetings
}

#[cfg(test)]
mod tests {
    use super::super::case::universe;
    use super::super::point::Point;
    use super::*;

    fn cases() -> Vec<Case> {
        let names = [
            "source:before-send:offer",
            "destination:after-receipt:offer",
            "destination:before-record:ready",
            "source:after-record:released",
            "source:before-send:commit",
        ];
        universe(&names.map(|name| Point::named(name).unwrap()))
    }

    #[test]
    fn every_pair_is_covered_by_few_cases() {
        let universe = cases();
        let cover = pairwise(&universe, 1, usize::MAX);
        assert_eq!(cover.covered, cover.pairs);
        assert!(
            cover.cases.len() * 4 < universe.len(),
            "{}",
            cover.cases.len()
        );
        let all: HashSet<Meeting> = universe
            .iter()
            .flat_map(|case| meetings(case.kind))
            .collect();
        let chosen = cover.cases.iter().flat_map(|case| meetings(case.kind));
        assert_eq!(chosen.collect::<HashSet<_>>(), all);
    }

    #[test]
    fn the_seed_decides() {
        let universe = cases();
        let names = |seed| -> Vec<String> {
            let cover = pairwise(&universe, seed, 12);
            cover.cases.iter().map(Case::to_string).collect()
        };
        assert_eq!(names(1), names(1));
        assert_ne!(names(1), names(2));
        assert_eq!(names(1).len(), 12);
    }
}
