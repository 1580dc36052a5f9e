//! Fuzzes datagrams of the frame plane: from anyone, and sealed by a peer that sends anything.

use longhaul_overlay::fragment::Reassembler;
use longhaul_overlay::offload::{Merger, VirtioHeader};
use longhaul_overlay::seal::{
    EXPORTED_BYTES, HEADER_BYTES, KeyLimits, Kind, OVERHEAD_BYTES, OpenError, Side, Suite, halves,
};
use longhaul_overlay::{NetworkId, Session, SessionConfig, control, seal};
use std::time::Duration;

const SECRET: [u8; EXPORTED_BYTES] = [9; EXPORTED_BYTES];
const NETWORK: NetworkId = NetworkId(3);
const SUITE: Suite = Suite::ChaCha20Poly1305;
/// The maximum number of datagrams of one input.
const DATAGRAMS_MAX: usize = 32;

/// Runs `data`: records of a kind (one byte), a length (one byte), and bytes: a datagram as it is,
/// or the payload of a sealed one, which may be damaged. Returns how many datagrams were authentic,
/// and how many messages and frames they held.
pub(crate) fn run(data: &[u8]) -> (usize, usize) {
    let start = Duration::from_secs(1);
    let limits = KeyLimits {
        epoch_packets: 4,
        ..KeyLimits::default()
    };
    let (mut sealer, _) =
        halves(start, &SECRET, Side::Dialler, SUITE, limits).expect("keys can be derived");
    let mut session = Session::<u8>::new(start, SessionConfig::default(), Some(0));
    session
        .connected(start, &SECRET, Side::Listener, SUITE)
        .expect("keys can be derived");
    let (mut merger, mut reassembler) = (Merger::new(), Reassembler::new());
    let (mut authentic, mut held) = (0, 0);
    let mut rest = data;
    for step in 0..DATAGRAMS_MAX {
        let Some((&[what, length], more)) = rest.split_first_chunk::<2>() else {
            break;
        };
        let (record, more) = more.split_at(usize::from(length).min(more.len()));
        rest = more;
        let now = start + Duration::from_millis(step as u64 * 200);
        let mut datagram = record.to_vec();
        let kind = Kind::of(what & 0x0f);
        if let Some(kind) = kind {
            datagram = vec![0; OVERHEAD_BYTES + record.len()];
            datagram[HEADER_BYTES..HEADER_BYTES + record.len()].copy_from_slice(record);
            sealer
                .seal(now, sealer.epoch() as u8, kind, NETWORK, &mut datagram)
                .expect("few datagrams");
            sealer.confirmed(sealer.epoch() as u8);
        }
        let damaged = what & 0x10 != 0;
        if damaged && !datagram.is_empty() {
            let at = usize::from(length) * 7 % datagram.len();
            datagram[at] ^= 1 << (what >> 5);
        }
        let sent = seal::key_id(&datagram);
        match session.open(now, what >> 6, &mut datagram) {
            Ok(opened) => {
                assert!(!damaged && Some(opened.kind) == kind && opened.network == NETWORK);
                assert_eq!(opened.payload, record);
                authentic += 1;
                match opened.kind {
                    Kind::Control => _ = control::read(opened.payload, |_| held += 1),
                    Kind::Frame => merger.push(opened.payload, &mut |_, _| held += 1),
                    Kind::ShortSegment => {
                        merger.push_short(opened.payload, &mut |virtio, frame| {
                            let virtio = virtio.to_bytes();
                            VirtioHeader::parse(&virtio, frame.len()).expect("it can be read");
                            held += 1;
                        })
                    }
                    Kind::Fragment => {
                        let whole = reassembler.push(now, NETWORK, opened.payload);
                        held += usize::from(whole.is_ok_and(|whole| whole.is_some()));
                    }
                    Kind::PathProbe | Kind::MtuProbe => {}
                }
            }
            Err(error) => {
                assert!(damaged || kind.is_none(), "{error}");
                assert!(sent.is_some() || error == OpenError::Malformed);
            }
        }
        let mut out = [0; 2000];
        while let Some((_, bytes)) = session.poll_transmit(now, &mut out) {
            assert_eq!(Kind::of(out[0]).map(|kind| kind as u8), Some(out[0]));
            assert!((OVERHEAD_BYTES..=1472).contains(&bytes));
        }
        while session.poll_event().is_some() {}
    }
    merger.flush(&mut |_, _| held += 1);
    (authentic, held)
}
