//! Chooses a small set of cases that covers all pairs of two properties of a case.

use super::case::{Case, Kind, Victim};
use super::point::Step;
use std::collections::{BTreeMap, HashMap};

/// A small generator whose sequence depends on nothing but its seed (SplitMix64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Returns the sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number below a limit, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        (word % limit.max(1) as u64) as usize
    }
}

/// The chosen cases, those that cover most first.
#[derive(Debug)]
pub struct Cover {
    /// The cases.
    pub cases: Vec<Case>,
    /// Covered pairs of traits.
    pub traits: Covered,
    /// Covered pairs of properties.
    pub properties: Covered,
}

/// The number of covered pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Covered {
    /// Covered by the chosen cases.
    pub pairs: usize,
    /// Covered by all cases.
    pub of: usize,
}

/// The number of random retries when a choice is too small for all pairs of traits.
const TRIES: usize = 64;

/// Chooses at most `most` cases which together cover all pairs of traits, if that number is
/// sufficient, and then as many pairs of properties as a greedy choice can. Remaining choices of
/// points, and of cases, are decided by the seed.
///
/// The properties of a case are those of [`Kind`]. Its traits are the same with the victims and the
/// steps of a move in few groups: there are more than a hundred pairs of a victim and a step, so no
/// small choice has them all.
pub fn pairwise(universe: &[Case], seed: u64, most: usize) -> Cover {
    let mut by_kind: BTreeMap<Kind, Vec<&Case>> = BTreeMap::new();
    for case in universe {
        by_kind.entry(case.kind).or_default().push(case);
    }
    let kinds: Vec<Kind> = by_kind.keys().copied().collect();
    let traits = Pairs::of(kinds.iter().map(traits));
    let properties = Pairs::of(kinds.iter().map(properties));
    let mut random = Random::new(seed);
    let mut best: Option<Choice> = None;
    for _ in 0..TRIES {
        let choice = Choice::make(&traits, &properties, most, &mut random);
        let enough = choice.traits == traits.count;
        if best.as_ref().is_none_or(|best| choice.traits > best.traits) {
            best = Some(choice);
        }
        if enough {
            break;
        }
    }
    let best = best.unwrap_or_default();
    let chosen = best
        .kinds
        .iter()
        .filter_map(|kind| by_kind.get(&kinds[*kind]));
    Cover {
        cases: chosen
            .map(|same| same[random.below(same.len())].clone())
            .collect(),
        traits: Covered {
            pairs: best.traits,
            of: traits.count,
        },
        properties: Covered {
            pairs: best.properties,
            of: properties.count,
        },
    }
}

/// Returns the traits: the victim, in groups; the step, in four; the side, or between them; and the
/// other properties.
fn traits(kind: &Kind) -> Vec<usize> {
    let what = match kind.victim {
        Victim::SourceAgent | Victim::DestinationAgent | Victim::BothAgents | Victim::Record => 0,
        Victim::SourceQemu | Victim::DestinationQemu => 1,
        Victim::SourceFront
        | Victim::DestinationFront
        | Victim::SourceSupervisor
        | Victim::DestinationSupervisor
        | Victim::PageServer => 2,
        Victim::Connection | Victim::Link => 3,
    };
    let part = match kind.step {
        Step::Asking
        | Step::Offering
        | Step::Sending
        | Step::Cancelling
        | Step::Refusing
        | Step::Resuming => 0,
        Step::Stopped | Step::Ready => 1,
        Step::Released | Step::Committed | Step::Recovering | Step::Returning => 2,
        Step::Pulling | Step::Done | Step::Elsewhere => 3,
    };
    let side = match kind.victim {
        Victim::SourceAgent
        | Victim::SourceQemu
        | Victim::SourceFront
        | Victim::SourceSupervisor => 0,
        Victim::DestinationAgent
        | Victim::DestinationQemu
        | Victim::DestinationFront
        | Victim::DestinationSupervisor
        | Victim::PageServer => 1,
        Victim::BothAgents | Victim::Connection | Victim::Link | Victim::Record => 2,
    };
    let mut values = vec![what, part, side];
    values.extend(circumstances(kind));
    values
}

fn properties(kind: &Kind) -> Vec<usize> {
    let mut values = vec![kind.victim as usize, kind.step as usize];
    values.extend(circumstances(kind));
    values
}

fn circumstances(kind: &Kind) -> [usize; 7] {
    [
        kind.pair as usize,
        kind.release as usize,
        usize::from(kind.locks),
        kind.back as usize,
        kind.disks as usize,
        kind.format as usize,
        kind.memory as usize,
    ]
}

/// Two values by their indices.
type Pair = ((usize, usize), (usize, usize));

/// The pairs of values that each kind of case covers.
struct Pairs {
    /// The total number of pairs.
    count: usize,
    /// The numbers of the pairs of each kind.
    of: Vec<Vec<usize>>,
}

impl Pairs {
    fn of(kinds: impl Iterator<Item = Vec<usize>>) -> Self {
        let mut numbers: HashMap<Pair, usize> = HashMap::new();
        let mut of = Vec::new();
        for values in kinds {
            let values: Vec<(usize, usize)> = values.into_iter().enumerate().collect();
            let mut pairs = Vec::new();
            for (place, first) in values.iter().enumerate() {
                for second in values.iter().skip(place + 1) {
                    let next = numbers.len();
                    pairs.push(*numbers.entry((*first, *second)).or_insert(next));
                }
            }
            of.push(pairs);
        }
        Self {
            count: numbers.len(),
            of,
        }
    }
}

/// Kinds of cases by their numbers, and the number of covered pairs.
#[derive(Debug, Default)]
struct Choice {
    kinds: Vec<usize>,
    traits: usize,
    properties: usize,
}

impl Choice {
    fn make(traits: &Pairs, properties: &Pairs, most: usize, random: &mut Random) -> Self {
        let mut missing = [vec![true; traits.count], vec![true; properties.count]];
        let mut choice = Self::default();
        while choice.kinds.len() < most && missing.iter().flatten().any(|missing| *missing) {
            let gain = |kind: usize| {
                let new = |pairs: &Pairs, missing: &[bool]| {
                    pairs.of[kind].iter().filter(|pair| missing[**pair]).count()
                };
                (new(traits, &missing[0]), new(properties, &missing[1]))
            };
            let mut best = (0, 0);
            let mut candidates = Vec::new();
            for kind in 0..traits.of.len() {
                let gain = gain(kind);
                if gain > best {
                    best = gain;
                    candidates.clear();
                }
                if gain == best {
                    candidates.push(kind);
                }
            }
            let kind = candidates[random.below(candidates.len())];
            for (pairs, missing) in [traits, properties].into_iter().zip(&mut missing) {
                for pair in &pairs.of[kind] {
                    missing[*pair] = false;
                }
            }
            choice.traits += best.0;
            choice.properties += best.1;
            choice.kinds.push(kind);
        }
        choice
    }
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
    fn every_pair_of_properties_is_covered_by_few_cases() {
        let universe = cases();
        let cover = pairwise(&universe, 1, usize::MAX);
        assert_eq!(cover.properties.pairs, cover.properties.of);
        assert!(
            cover.cases.len() * 4 < universe.len(),
            "{}",
            cover.cases.len()
        );
        let pairs = |kinds: Vec<Kind>| Pairs::of(kinds.iter().map(properties)).count;
        let all = pairs(universe.iter().map(|case| case.kind).collect());
        assert_eq!(
            pairs(cover.cases.iter().map(|case| case.kind).collect()),
            all
        );
        assert_eq!(cover.properties.of, all);
    }

    #[test]
    fn twenty_four_cases_cover_every_pair_of_traits() {
        let universe = universe(&Point::all().collect::<Vec<_>>());
        let pairs = |kinds: Vec<Kind>| Pairs::of(kinds.iter().map(traits)).count;
        let all = pairs(universe.iter().map(|case| case.kind).collect());
        for seed in [1, 20_779, 20_780] {
            let cover = pairwise(&universe, seed, 24);
            assert_eq!(cover.cases.len(), 24);
            let kinds: Vec<Kind> = cover.cases.iter().map(|case| case.kind).collect();
            assert_eq!(pairs(kinds), all, "{seed}");
        }
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
