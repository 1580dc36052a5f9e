//! Tests both halves against each other, and against damage.

use super::*;

const SECRET: [u8; EXPORTED_BYTES] = [7; EXPORTED_BYTES];
const T: Duration = Duration::from_secs(50);
const NETWORK: NetworkId = NetworkId(0x0102_0304_0506_0708);

fn limits() -> KeyLimits {
    KeyLimits {
        epoch_packets: 10,
        packets_max: 30,
        forged_max: 20,
        ..KeyLimits::default()
    }
}

fn pair(limits: KeyLimits, suite: Suite) -> [(Sealer, Opener); 2] {
    [Side::Dialler, Side::Listener].map(|side| halves(T, &SECRET, side, suite, limits).unwrap())
}

fn seal(sealer: &mut Sealer, seen: u8, payload: &[u8]) -> Vec<u8> {
    let mut datagram = vec![0; OVERHEAD_BYTES + payload.len()];
    datagram[HEADER_BYTES..HEADER_BYTES + payload.len()].copy_from_slice(payload);
    sealer
        .seal(T, seen, Kind::Frame, NETWORK, &mut datagram)
        .unwrap();
    datagram
}

fn open(opener: &mut Opener, datagram: &[u8]) -> Result<(u64, u64, Vec<u8>), OpenError> {
    let mut datagram = datagram.to_vec();
    let opened = opener.open(T, &mut datagram)?;
    assert_eq!((opened.kind, opened.network), (Kind::Frame, NETWORK));
    Ok((opened.epoch, opened.counter, opened.payload.to_vec()))
}

#[test]
fn both_directions_with_both_suites() {
    for suite in [Suite::Aes256Gcm, Suite::ChaCha20Poly1305] {
        let [(mut to, mut from), (mut back, mut there)] = pair(KeyLimits::default(), suite);
        let first = seal(&mut to, 0, b"first");
        assert_eq!(key_id(&first), Some(there.key_id()));
        assert_ne!(to.key_id(), back.key_id());
        assert_eq!(open(&mut there, &first), Ok((0, 0, b"first".to_vec())));
        assert_eq!(open(&mut there, &first), Err(OpenError::Replayed));
        assert_eq!(open(&mut from, &first), Err(OpenError::KeyId));
        let second = seal(&mut back, 0, b"");
        assert_eq!(open(&mut from, &second), Ok((0, 0, Vec::new())));
        assert_eq!(there.counters().opened, 1);
        assert_eq!(there.counters().replayed, 1);
        assert_eq!(from.counters().malformed, 1);
    }
    let [(mut to, _), _] = pair(KeyLimits::default(), Suite::Aes256Gcm);
    let [_, (_, mut other)] = pair(KeyLimits::default(), Suite::ChaCha20Poly1305);
    assert_eq!(
        open(&mut other, &seal(&mut to, 0, b"x")),
        Err(OpenError::Forged)
    );
}

#[test]
fn each_changed_bit_is_found() {
    let [(mut to, _), (_, mut there)] = pair(KeyLimits::default(), Suite::Aes256Gcm);
    let datagram = seal(&mut to, 0, b"a payload");
    for bit in 0..datagram.len() * 8 {
        let mut bad = datagram.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(there.open(T, &mut bad).is_err(), "bit {bit}");
    }
    for length in 0..datagram.len() {
        let mut cut = datagram[..length].to_vec();
        assert!(there.open(T, &mut cut).is_err(), "{length}");
    }
    assert!(open(&mut there, &datagram).is_ok(), "nothing has changed");
    assert_eq!(there.epoch(), 0);
}

#[test]
fn a_batch_is_sealed_and_opened_in_place() {
    let [(mut to, _), (_, mut there)] = pair(KeyLimits::default(), Suite::Aes256Gcm);
    let stride = 100;
    let mut batch: Vec<u8> = (0..475).map(|byte| byte as u8).collect();
    let plain = batch.clone();
    to.seal_batch(T, 0, Kind::Frame, NETWORK, &mut batch, stride)
        .unwrap();
    let copy = batch.clone();
    let mut counter = 0;
    there.open_batch(T, &mut batch, stride, |opened| {
        let opened = opened.unwrap();
        let start = counter as usize * stride + HEADER_BYTES;
        assert_eq!(opened.payload, &plain[start..start + opened.payload.len()]);
        assert_eq!((opened.counter, opened.newest), (counter, true));
        counter += 1;
    });
    assert_eq!(counter, 5);
    // Sent again, with one that is damaged: each is judged by itself.
    let mut again = copy;
    again[150] ^= 1;
    let mut results = Vec::new();
    there.open_batch(T, &mut again, stride, |opened| {
        results.push(opened.map(|_| ()))
    });
    assert_eq!(results, [Err(OpenError::Replayed); 5]);
    for (length, stride) in [(0, 100), (100, 39), (139, 100), (40, 0)] {
        let mut short = vec![0; length];
        let sealed = to.seal_batch(T, 0, Kind::Frame, NETWORK, &mut short, stride);
        assert_eq!(sealed, Err(SealError::Length));
    }
    // What fails early spends no counter.
    assert_eq!(seal(&mut to, 0, b"")[8..16], [5, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn epochs_change_when_they_are_confirmed() {
    let [(mut to, _), (mut back, mut there)] = pair(limits(), Suite::Aes256Gcm);
    let mut kept = Vec::new();
    for epoch in 0..600u64 {
        // The first of each epoch stays on the way.
        for count in 0..10 {
            let datagram = seal(&mut to, 0, b"x");
            if count == 0 {
                kept.push(datagram);
            } else {
                assert_eq!(
                    open(&mut there, &datagram),
                    Ok((epoch, count, b"x".to_vec()))
                );
            }
        }
        to.confirmed(there.seen());
        if epoch > 0 {
            let late = kept.remove(0);
            assert!(open(&mut there, &late).is_ok());
            assert_eq!(open(&mut there, &late), Err(OpenError::Replayed));
        }
    }
    assert_eq!(there.epoch(), 599);
    let datagram = seal(&mut back, there.seen(), b"");
    assert_eq!(datagram[2], 599u64 as u8);
}

#[test]
fn without_a_confirmation_a_sender_stops() {
    let [(mut to, _), (_, mut there)] = pair(limits(), Suite::Aes256Gcm);
    // The first epoch need not be confirmed: its receiver has the keys of the next one.
    for _ in 0..10 + 30 {
        seal(&mut to, 0, b"x");
    }
    let mut datagram = [0; OVERHEAD_BYTES];
    let sealed = to.seal(T, 0, Kind::Control, NetworkId::NONE, &mut datagram);
    assert_eq!(sealed, Err(SealError::Exhausted));
    assert_eq!(datagram, [0; OVERHEAD_BYTES]);
    // A confirmation of another epoch does not help.
    to.confirmed(0);
    assert!(
        to.seal(T, 0, Kind::Control, NetworkId::NONE, &mut datagram)
            .is_err()
    );
    to.confirmed(1);
    assert!(
        to.seal(T, 0, Kind::Control, NetworkId::NONE, &mut datagram)
            .is_ok()
    );
    assert_eq!(to.epoch(), 2);
    // A receiver at epoch 0 has no keys for it.
    assert_eq!(there.open(T, &mut datagram), Err(OpenError::Epoch));
}

#[test]
fn time_changes_epochs_and_erases_keys() {
    let [(mut to, _), (_, mut there)] = pair(KeyLimits::default(), Suite::Aes256Gcm);
    let (late, later) = (seal(&mut to, 0, b"x"), seal(&mut to, 0, b"x"));
    assert!(open(&mut there, &seal(&mut to, 0, b"x")).is_ok());
    let next = T + Duration::from_secs(120);
    let mut datagram = [0; OVERHEAD_BYTES];
    to.seal(next, 0, Kind::Control, NetworkId::NONE, &mut datagram)
        .unwrap();
    assert_eq!(to.epoch(), 1);
    let opened = there.open(next, &mut datagram).unwrap();
    assert!(opened.newest);
    let soon = next + Duration::from_secs(9);
    let mut copy = late;
    assert!(!there.open(soon, &mut copy).unwrap().newest);
    let mut copy = later;
    let after = next + Duration::from_secs(10);
    assert_eq!(there.open(after, &mut copy), Err(OpenError::Epoch));
    // An idle sender does not go on with each look at the clock.
    let mut datagram = [0; OVERHEAD_BYTES];
    to.seal(next * 9, 0, Kind::Control, NetworkId::NONE, &mut datagram)
        .unwrap();
    assert_eq!(to.epoch(), 1, "not confirmed");
}

#[test]
fn too_many_forgeries_end_a_key() {
    let [(mut to, _), (_, mut there)] = pair(limits(), Suite::ChaCha20Poly1305);
    let datagram = seal(&mut to, 0, b"x");
    let mut bad = datagram.clone();
    *bad.last_mut().unwrap() ^= 1;
    for _ in 0..20 {
        assert_eq!(open(&mut there, &bad), Err(OpenError::Forged));
    }
    assert_eq!(open(&mut there, &datagram), Err(OpenError::Exhausted));
    assert_eq!(there.counters().forged, 21);
}

#[test]
fn keys_are_not_printed() {
    let [(to, from), _] = pair(limits(), Suite::Aes256Gcm);
    let text = format!("{to:?} {from:?}");
    assert!(
        text.contains("EpochKey") && !text.contains("7, 7"),
        "{text}"
    );
}
