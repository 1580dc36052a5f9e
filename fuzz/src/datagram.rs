//! Fuzzes what anyone may send to an agent's UDP port before QUIC gets it: sorted, answered within
//! limits, or dropped.

use longhaul_transport::{
    BindingAnswer, BindingRequest, DatagramKind, STUN_ANSWER_BYTES_MAX, binding_answer, keep_quic,
};

/// Takes `data` as one datagram, and as datagrams whose length is its first byte.
pub(crate) fn run(data: &[u8]) {
    sort(data);
    for from in [
        "192.0.2.1:7400",
        "[2001:db8::1]:7400",
        "[::ffff:192.0.2.1]:1",
    ] {
        let from = from.parse().expect("an address");
        let Some(answer) = binding_answer(data, from) else {
            assert!(BindingRequest::decode(data).is_err());
            continue;
        };
        assert!(answer.len() <= STUN_ANSWER_BYTES_MAX);
        assert_eq!(DatagramKind::of(answer[0]), DatagramKind::Stun);
        let answer = BindingAnswer::decode(&answer).expect("what was written can be read");
        let request = BindingRequest::decode(data).expect("it was answered");
        assert_eq!(answer.transaction, request.transaction);
        assert_eq!(answer.fingerprint, request.fingerprint);
        match answer.result {
            Ok(address) => assert_eq!(address.port(), from.port()),
            Err(error) => assert_eq!(error.unknown, request.unknown),
        }
        let again = BindingRequest::decode(&request.encode()).expect("what was written");
        assert_eq!(again.transaction, request.transaction);
    }
    if let Ok(answer) = BindingAnswer::decode(data) {
        let bytes = answer.encode();
        assert!(bytes.len() <= STUN_ANSWER_BYTES_MAX);
        assert_eq!(BindingAnswer::decode(&bytes), Ok(answer));
    }
}

fn sort(data: &[u8]) {
    let Some((stride, received)) = data.split_first() else {
        return;
    };
    let stride = usize::from(*stride);
    let mut sorted = received.to_vec();
    let mut others = 0;
    let kept = keep_quic(&mut sorted, stride, |kind, datagram| {
        assert_ne!(kind, DatagramKind::Quic);
        others += datagram.len();
    });
    assert_eq!(kept + others, received.len());
    let quic = received.chunks(if stride == 0 { usize::MAX } else { stride });
    let quic = quic.filter(|datagram| DatagramKind::of(datagram[0]) == DatagramKind::Quic);
    assert_eq!(sorted[..kept], quic.collect::<Vec<_>>().concat());
}
