//! The correction of ranges by the errors of earlier moves.

use super::Range;

/// Weight of the model's own width, in moves.
const MODEL_MOVES: f64 = 8.0;
/// The largest correction of a range's middle, as a factor.
const CORRECTION_MAX: f64 = 4.0;
/// The narrowest range, as a factor to each side.
const WIDTH_MIN: f64 = 1.08;

/// The error of one prediction: the logarithm of the outcome relative to the middle of the
/// uncorrected range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Error(f64);

impl Error {
    /// Returns the error of a figure; `None` if it has none, because one of the two is zero.
    pub fn of(predicted: f64, was: f64) -> Option<Self> {
        let error = (was / predicted).ln();
        (predicted > 0.0 && was > 0.0 && error.is_finite()).then_some(Self(error))
    }
}

/// What the errors of earlier moves say about a figure.
///
/// - The middle is multiplied by the median error of these moves and of one more without an error.
///   A single move is thus half believed, and one that went differently from all others changes
///   nothing.
/// - The width to each side is the average of the model's width, which counts as 8 moves, and of
///   the 90th percentile of the remaining errors, which counts as many moves as there are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Learned {
    correction: f64,
    remaining: f64,
    moves: usize,
}

impl Learned {
    /// Learns from the errors of a figure.
    pub fn from(errors: &[Error]) -> Self {
        let limit = CORRECTION_MAX.ln();
        let all = errors.iter().map(|error| error.0).chain([0.0]);
        let correction = percentile(all.collect(), 0.5).clamp(-limit, limit);
        let remaining = errors.iter().map(|error| (error.0 - correction).abs());
        Self {
            correction,
            remaining: percentile(remaining.collect(), 0.9),
            moves: errors.len(),
        }
    }

    /// Corrects a range.
    pub fn correct(&self, range: Range) -> Range {
        let Range { low, likely, high } = range;
        if likely <= 0.0 {
            return range;
        }
        let moves = self.moves as f64;
        let middle = likely * self.correction.exp();
        let width = |own: f64| {
            let together = MODEL_MOVES * own + moves * self.remaining;
            (together / (MODEL_MOVES + moves)).max(WIDTH_MIN.ln()).exp()
        };
        let below = match low > 0.0 {
            true => (likely / low).ln(),
            // The figure may be zero.
            false => {
                return Range {
                    low,
                    likely: middle,
                    high: middle * width((high / likely).ln()),
                };
            }
        };
        Range {
            low: middle / width(below),
            likely: middle,
            high: middle * width((high / likely).ln()),
        }
    }
}

/// Returns a percentile, between two values by their average; 0 of none.
fn percentile(mut values: Vec<f64>, percentile: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = values.len().saturating_sub(1) as f64 * percentile;
    let [below, above] = [at.floor(), at.ceil()].map(|at| values.get(at as usize).copied());
    match (below, above) {
        (Some(below), Some(above)) => below + (above - below) * at.fract(),
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: Range = Range {
        low: 50.0,
        likely: 100.0,
        high: 200.0,
    };

    fn learned(outcomes: &[f64]) -> Range {
        let errors = outcomes.iter().map(|was| Error::of(100.0, *was).unwrap());
        Learned::from(&errors.collect::<Vec<_>>()).correct(RANGE)
    }

    fn is_about(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 0.01
    }

    #[test]
    fn without_errors_nothing_is_corrected() {
        let range = learned(&[]);
        assert!(
            is_about(range.low, 50.0) && is_about(range.high, 200.0),
            "{range:?}"
        );
        assert!(is_about(range.likely, 100.0));
    }

    #[test]
    fn one_move_is_half_believed_and_several_are_believed() {
        let half = learned(&[200.0]);
        assert!(is_about(half.likely, 141.4), "{half:?}");
        let whole = learned(&[200.0; 8]);
        assert!(is_about(whole.likely, 200.0), "{whole:?}");
        // The model's width counts as 8 of 16 moves.
        assert!(is_about(whole.high / whole.likely, 2_f64.powf(8.0 / 16.0)));
    }

    #[test]
    fn one_move_that_went_differently_does_not_shift_the_middle() {
        let range = learned(&[100.0, 101.0, 99.0, 100.0, 1000.0]);
        assert!(is_about(range.likely, 100.0), "{range:?}");
        assert!(range.high > 200.0, "but the range is wider: {range:?}");
    }

    #[test]
    fn the_correction_has_a_limit_and_so_has_the_width() {
        let range = learned(&[1e9; 8]);
        assert!(is_about(range.likely, 400.0), "{range:?}");
        let exact = Range {
            low: 100.0,
            likely: 100.0,
            high: 100.0,
        };
        let range = Learned::from(&[]).correct(exact);
        assert!(
            is_about(range.high, 108.0) && is_about(range.low, 92.6),
            "{range:?}"
        );
    }

    #[test]
    fn a_figure_that_is_zero_has_no_error_and_is_not_corrected() {
        assert_eq!(Error::of(0.0, 1.0), None);
        assert_eq!(Error::of(1.0, 0.0), None);
        let none = Range {
            low: 0.0,
            likely: 0.0,
            high: 3.0,
        };
        assert_eq!(Learned::from(&[]).correct(none), none);
    }
}
