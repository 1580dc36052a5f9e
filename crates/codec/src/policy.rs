//! Chooses the compression of the next frame: the one that moves most guest bytes per second.
//!
//! A frame's bytes pass two stages that run in parallel, the encoder and the link. With a
//! compression that leaves `ratio` of the bytes, the two move `min(encode rate, link rate /
//! ratio)`. The encoder's time includes the cost of each frame before encoding, which dominates
//! without compression. All of it is measured on actual frames; the values of a compression that
//! has not been used recently return to the typical ones, so that it is tried again when content
//! changes. Where other processes need the processor, encoding takes longer, and a cheaper
//! compression is chosen automatically.

use crate::Compression;
use std::time::Duration;

/// The choices from the cheapest to the most expensive, with typical values for guest memory: the
/// ratio, and guest bytes encoded per second.
const TYPICAL: [(Compression, f64, f64); 7] = [
    (Compression::Raw, 1.0, 20.0e9),
    (Compression::Lz4Fast, 0.62, 2.0e9),
    (Compression::Lz4, 0.50, 0.9e9),
    (Compression::Zstd(-1), 0.42, 0.65e9),
    (Compression::Zstd(1), 0.35, 0.55e9),
    (Compression::ZstdLong(3), 0.31, 0.33e9),
    (DEAREST, 0.295, 0.12e9),
];

/// Saves little, and costs three times as much as the next one: only for encoders that are idle
/// most of the time.
const DEAREST: Compression = Compression::ZstdLong(6);
const DEAREST_WORK_MAX: f64 = 0.5;

/// The typical time of reading and digesting blocks, in seconds, for this many bytes to encode.
const PREPARING: (f64, f64) = (50e-6, 256e3);

/// The weight of one more measurement.
const LEARN: f64 = 1.0 / 8.0;
/// How far the values of unused compressions return to the typical ones with each frame.
const FORGET: f64 = 1.0 / 1024.0;
/// A shorter queue of the link, in bytes, means that the link waits for the encoder and could carry
/// more.
const QUEUE_MIN: usize = 64 << 10;
const STARVED_LINK: f64 = 2.0;
/// For each encoded frame in the queue, up to a limit, encoding may take this much longer than the
/// link: the encoder is ahead, and one slow frame is not significant.
const PATIENCE: f64 = 0.75;
const READY_FRAMES_MAX: usize = 2;
/// A more expensive compression must move this much more, so that noise does not decide.
const GAIN_MIN: f64 = 1.05;

/// Chooses a compression for each frame from the cost and savings of the last ones.
#[derive(Debug, Clone)]
pub struct CompressionPolicy {
    workers: f64,
    /// Ratio and rate, in the order of [`TYPICAL`].
    measured: [(f64, f64); TYPICAL.len()],
    /// In the form of [`PREPARING`].
    preparing: (f64, f64),
}

impl CompressionPolicy {
    /// Creates a policy for `workers` concurrent encoders.
    pub fn new(workers: usize) -> Self {
        Self {
            workers: workers.max(1) as f64,
            measured: TYPICAL.map(|(_, ratio, rate)| (ratio, rate)),
            preparing: PREPARING,
        }
    }

    /// Records the times of a frame before and in the encoder: `asked` is the compression chosen
    /// for it, even if it was stored raw.
    pub fn observe(
        &mut self,
        asked: Compression,
        payload_bytes: usize,
        stored_bytes: usize,
        prepare_time: Duration,
        encode_time: Duration,
    ) {
        if payload_bytes == 0 || encode_time.is_zero() {
            return;
        }
        let (time, bytes) = &mut self.preparing;
        *time += (prepare_time.as_secs_f64() - *time) * LEARN;
        *bytes += (payload_bytes as f64 - *bytes) * LEARN;
        let ratio = stored_bytes as f64 / payload_bytes as f64;
        let rate = payload_bytes as f64 / encode_time.as_secs_f64();
        for (known, typical) in self.measured.iter_mut().zip(TYPICAL) {
            let (toward, weight) = match typical.0 == asked {
                true => ((ratio, rate), LEARN),
                false => ((typical.1, typical.2), FORGET),
            };
            known.0 += (toward.0 - known.0) * weight;
            known.1 += (toward.1 - known.1) * weight;
        }
    }

    /// Returns the compression for the next frame. `queued_bytes` are in flight on a link of
    /// `link_bytes_per_s`; while its rate is unknown, the queue shows whether it is slow.
    /// `ready_frames` are encoded and not sent yet.
    pub fn choose(
        &self,
        link_bytes_per_s: Option<f64>,
        queued_bytes: usize,
        ready_frames: usize,
    ) -> Compression {
        let Some(link) = link_bytes_per_s.filter(|rate| *rate > 0.0) else {
            return if queued_bytes == 0 {
                Compression::Lz4
            } else {
                Compression::Zstd(1)
            };
        };
        let link = if queued_bytes < QUEUE_MIN {
            link * STARVED_LINK
        } else {
            link
        };
        let patience = 1.0 + PATIENCE * ready_frames.min(READY_FRAMES_MAX) as f64;
        let preparing = self.preparing.0 / self.preparing.1;
        let (mut best, mut best_rate) = (Compression::Raw, 0.0);
        for ((compression, ..), (ratio, rate)) in TYPICAL.iter().zip(self.measured) {
            let encoded = self.workers / (1.0 / rate + preparing);
            let moved = (encoded * patience).min(link / ratio.max(1e-3));
            if *compression == DEAREST && moved > encoded * DEAREST_WORK_MAX {
                continue;
            }
            if moved > best_rate * GAIN_MIN {
                (best, best_rate) = (*compression, moved);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MBIT: f64 = 1e6 / 8.0;
    const READ: Duration = Duration::from_micros(50);

    #[test]
    fn the_slower_the_link_the_dearer_the_compression() {
        let policy = CompressionPolicy::new(1);
        assert_eq!(policy.choose(Some(100.0 * MBIT), 1 << 20, 0), DEAREST);
        assert_eq!(
            policy.choose(Some(200.0 * MBIT), 1 << 20, 0),
            Compression::ZstdLong(3)
        );
        assert_eq!(
            policy.choose(Some(100.0 * MBIT), 0, 0),
            Compression::ZstdLong(3),
            "nothing waits: the link could carry more"
        );
        assert_eq!(
            policy.choose(Some(1000.0 * MBIT), 1 << 20, 0),
            Compression::Zstd(1)
        );
        assert_eq!(
            policy.choose(Some(3000.0 * MBIT), 1 << 20, 0),
            Compression::Lz4
        );
        assert_eq!(
            policy.choose(Some(8000.0 * MBIT), 1 << 20, 0),
            Compression::Lz4Fast
        );
        assert_eq!(policy.choose(Some(40_000.0 * MBIT), 0, 0), Compression::Raw);
        let dear = |mbit: u32| {
            let choice = policy.choose(Some(f64::from(mbit) * MBIT), 0, 0);
            TYPICAL
                .iter()
                .position(|(compression, ..)| *compression == choice)
        };
        let choices: Vec<_> = (1..400).map(|step| dear(step * 100)).collect();
        assert!(choices.is_sorted_by(|a, b| a >= b), "{choices:?}");
    }

    #[test]
    fn some_slow_frames_do_not_matter_while_others_are_ready() {
        let mut policy = CompressionPolicy::new(1);
        let (link, queued) = (Some(200.0 * MBIT), 1 << 20);
        let dear = policy.choose(link, queued, 0);
        // The encoder had to wait for a processor.
        let slow = Duration::from_millis(30);
        (0..14).for_each(|_| policy.observe(dear, 1 << 18, 80 << 10, READ, slow));
        let cheaper = |ready| policy.choose(link, queued, ready) != dear;
        assert!(cheaper(0), "nothing is ready: the link would wait");
        assert!(!cheaper(READY_FRAMES_MAX));
        assert!(!cheaper(1000));
        // It gets no processor at all.
        (0..50).for_each(|_| policy.observe(dear, 1 << 18, 80 << 10, READ, slow));
        assert_ne!(policy.choose(link, queued, READY_FRAMES_MAX), dear);
    }

    #[test]
    fn an_unknown_link_is_judged_by_its_queue() {
        let policy = CompressionPolicy::new(1);
        assert_eq!(policy.choose(None, 0, 0), Compression::Lz4);
        assert_eq!(policy.choose(None, 1 << 20, 0), Compression::Zstd(1));
        assert_eq!(policy.choose(Some(0.0), 1 << 20, 0), Compression::Zstd(1));
    }

    #[test]
    fn content_that_does_not_compress_ends_up_raw_and_recovers() {
        let mut policy = CompressionPolicy::new(1);
        let link = Some(1000.0 * MBIT);
        for _ in 0..300 {
            let choice = policy.choose(link, 1 << 20, 0);
            policy.observe(choice, 1 << 18, 1 << 18, READ, Duration::from_micros(400));
        }
        assert_eq!(policy.choose(link, 1 << 20, 0), Compression::Raw);
        let mut compressed = 0;
        for _ in 0..3000 {
            let choice = policy.choose(link, 1 << 20, 0);
            let stored = if choice == Compression::Raw {
                1 << 18
            } else {
                1 << 16
            };
            compressed += u32::from(choice != Compression::Raw);
            policy.observe(choice, 1 << 18, stored, READ, Duration::from_micros(400));
        }
        assert!(compressed > 2000, "{compressed} of 3000");
    }

    #[test]
    fn a_slow_encoder_is_not_asked_to_compress_for_a_fast_link() {
        let mut policy = CompressionPolicy::new(1);
        for _ in 0..200 {
            for (compression, ..) in &TYPICAL[1..] {
                policy.observe(
                    *compression,
                    1 << 18,
                    1 << 17,
                    READ,
                    Duration::from_millis(10),
                );
            }
        }
        assert_eq!(
            policy.choose(Some(1000.0 * MBIT), 1 << 20, 0),
            Compression::Raw
        );
        assert_ne!(
            policy.choose(Some(100.0 * MBIT), 1 << 20, 0),
            Compression::Raw
        );
    }

    #[test]
    fn a_frame_without_literals_teaches_nothing() {
        let mut policy = CompressionPolicy::new(2);
        let before = (policy.measured, policy.preparing);
        policy.observe(Compression::Lz4, 0, 0, READ, Duration::from_millis(1));
        policy.observe(Compression::Lz4, 100, 100, READ, Duration::ZERO);
        assert_eq!(before, (policy.measured, policy.preparing));
    }

    #[test]
    fn what_a_frame_costs_before_it_is_encoded_counts() {
        let after = |read| {
            let mut policy = CompressionPolicy::new(1);
            for _ in 0..200 {
                for (compression, stored, encode) in [
                    (Compression::Raw, 1 << 18, 12),
                    (Compression::Lz4Fast, 1 << 17, 120),
                ] {
                    let encode = Duration::from_micros(encode);
                    policy.observe(compression, 1 << 18, stored, read, encode);
                }
            }
            policy.choose(Some(13_600.0 * MBIT), 1 << 20, 0)
        };
        assert_eq!(after(READ / 50), Compression::Lz4Fast);
        assert_eq!(after(2 * READ), Compression::Raw, "1.2 GB/s for 1.7");
    }
}
