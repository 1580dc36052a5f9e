//! Fuzzes what anyone may send to an agent's UDP port before QUIC gets it: sorted, answered within
//! limits, or dropped.

use longhaul_protocol::HostId;
use longhaul_realm::protocol::SessionId;
use longhaul_realm::relay::HEADER_BYTES;
use longhaul_transport::{
    BindingAnswer, BindingRequest, DatagramKind, Outlet, STUN_ANSWER_BYTES_MAX, Source, Way,
    binding_answer, sort,
};
use std::net::SocketAddr;

/// Takes `data` as one datagram, and as datagrams whose length is its first byte.
pub(crate) fn run(data: &[u8]) {
    take_apart(data, None);
    take_apart(data, Some(HostId([9; 32])));
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

/// Counts what is not kept for QUIC. Sessions with an even number are known.
#[derive(Default)]
struct Others {
    bytes: usize,
    relayed: usize,
}

impl Outlet for Others {
    fn relayed_from(&mut self, _: HostId, session: SessionId) -> Option<SocketAddr> {
        let address = SocketAddr::new([240, 0, 0, session.0 as u8].into(), 1);
        session.0.is_multiple_of(2).then_some(address)
    }

    fn frames(&mut self, way: Way, datagrams: &mut [u8], stride: usize) {
        for datagram in datagrams.chunks(stride) {
            assert_eq!(DatagramKind::of(datagram[0]), DatagramKind::Frame);
            self.relayed += usize::from(!way.is_direct());
        }
        self.bytes += datagrams.len();
        datagrams.fill(0);
    }

    fn stun(&mut self, datagram: &[u8]) {
        self.bytes += datagram.len();
    }

    fn dropped(&mut self, kind: DatagramKind, datagram: &[u8]) {
        assert_eq!(kind, DatagramKind::of(datagram[0]));
        self.bytes += datagram.len();
    }

    fn left(&mut self, _: SocketAddr, datagram: &[u8], stride: usize) {
        assert!(datagram.len() <= stride);
        assert_eq!(DatagramKind::of(datagram[0]), DatagramKind::Quic);
        self.bytes += datagram.len();
    }
}

fn take_apart(data: &[u8], server: Option<HostId>) {
    let Some((stride, received)) = data.split_first() else {
        return;
    };
    let mut source = Source::plain(SocketAddr::new([192, 0, 2, 1].into(), 7400));
    source.server = server;
    let mut sorted = received.to_vec();
    let mut others = Others::default();
    let kept = sort(&mut sorted, (*stride).into(), &source, &mut others);
    let mut count = 0;
    for datagram in sorted[..kept.length].chunks(kept.stride.max(1)) {
        assert_eq!(DatagramKind::of(datagram[0]), DatagramKind::Quic);
        count += 1;
    }
    // Only headers of relayed datagrams are gone.
    let gone = received.len() - kept.length - others.bytes;
    assert!(gone.is_multiple_of(HEADER_BYTES));
    if server.is_none() {
        assert_eq!((gone, others.relayed), (0, 0));
        let quic = received.chunks(match stride {
            0 => usize::MAX,
            stride => (*stride).into(),
        });
        let quic = quic.filter(|datagram| DatagramKind::of(datagram[0]) == DatagramKind::Quic);
        let quic = quic.collect::<Vec<_>>();
        assert_eq!(count, quic.len());
        assert_eq!(sorted[..kept.length], quic.concat());
    }
}
