//! Tests the codec against RFC 5769, and its limits.

use super::*;

const TRANSACTION: TransactionId = *b"\xb7\xe7\xa7\x01\xbc\x34\xd6\x86\xfa\x87\xdf\xae";

/// RFC 5769, section 2.1: a request with credentials and ICE's attributes.
const REQUEST: &[u8] = b"\x00\x01\x00\x58\x21\x12\xa4\x42\
    \xb7\xe7\xa7\x01\xbc\x34\xd6\x86\xfa\x87\xdf\xae\
    \x80\x22\x00\x10STUN test client\
    \x00\x24\x00\x04\x6e\x00\x01\xff\
    \x80\x29\x00\x08\x93\x2f\xf9\xb1\x51\x26\x3b\x36\
    \x00\x06\x00\x09evtj:h6vY\x20\x20\x20\
    \x00\x08\x00\x14\x9a\xea\xa7\x0c\xbf\xd8\xcb\x56\x78\x1e\
    \xf2\xb5\xb2\xd3\xf2\x49\xc1\xb5\x71\xa2\
    \x80\x28\x00\x04\xe5\x7a\x3b\xcf";

/// Section 2.2: an answer with an IPv4 address.
const ANSWER_IPV4: &[u8] = b"\x01\x01\x00\x3c\x21\x12\xa4\x42\
    \xb7\xe7\xa7\x01\xbc\x34\xd6\x86\xfa\x87\xdf\xae\
    \x80\x22\x00\x0btest vector\x20\
    \x00\x20\x00\x08\x00\x01\xa1\x47\xe1\x12\xa6\x43\
    \x00\x08\x00\x14\x2b\x91\xf5\x99\xfd\x9e\x90\xc3\x8c\x74\
    \x89\xf9\x2a\xf9\xba\x53\xf0\x6b\xe7\xd7\
    \x80\x28\x00\x04\xc0\x7d\x4c\x96";

/// Section 2.3: an answer with an IPv6 address.
const ANSWER_IPV6: &[u8] = b"\x01\x01\x00\x48\x21\x12\xa4\x42\
    \xb7\xe7\xa7\x01\xbc\x34\xd6\x86\xfa\x87\xdf\xae\
    \x80\x22\x00\x0btest vector\x20\
    \x00\x20\x00\x14\x00\x02\xa1\x47\
    \x01\x13\xa9\xfa\xa5\xd3\xf1\x79\xbc\x25\xf4\xb5\xbe\xd2\xb9\xd9\
    \x00\x08\x00\x14\xa3\x82\x95\x4e\x4b\xe6\x7b\xf1\x17\x84\
    \xc9\x7c\x82\x92\xc2\x75\xbf\xe3\xed\x41\
    \x80\x28\x00\x04\xc8\xfb\x0b\x4c";

#[test]
fn the_vectors_of_rfc_5769() {
    let request = BindingRequest::decode(REQUEST).unwrap();
    assert_eq!(request.transaction, TRANSACTION);
    assert!(request.fingerprint);
    // ICE's PRIORITY must be understood, and is not; the credentials are RFC 8489's own.
    assert_eq!(request.unknown, [0x0024]);
    for (bytes, address) in [
        (ANSWER_IPV4, "192.0.2.1:32853"),
        (ANSWER_IPV6, "[2001:db8:1234:5678:11:2233:4455:6677]:32853"),
    ] {
        let answer = BindingAnswer::decode(bytes).unwrap();
        assert_eq!(answer.transaction, TRANSACTION);
        assert_eq!(answer.result, Ok(address.parse().unwrap()));
        let again = answer.encode();
        assert!(again.len() <= STUN_ANSWER_BYTES_MAX);
        assert_eq!(BindingAnswer::decode(&again), Ok(answer));
    }
}

#[test]
fn a_changed_byte_under_a_fingerprint_is_seen() {
    for at in 0..REQUEST.len() {
        let mut bytes = REQUEST.to_vec();
        bytes[at] ^= 1;
        // A FINGERPRINT under another number is any attribute; the number of the last one.
        let renamed = at == REQUEST.len() - 8 || at == REQUEST.len() - 7;
        match BindingRequest::decode(&bytes) {
            Ok(request) => assert!(renamed && !request.fingerprint, "{at}"),
            Err(_) => assert!(!renamed, "{at}"),
        }
        assert!(BindingRequest::decode(&REQUEST[..at]).is_err());
    }
}

#[test]
fn messages_of_another_form_are_refused() {
    let plain = BindingRequest {
        transaction: TRANSACTION,
        fingerprint: false,
        unknown: Vec::new(),
    };
    let plain = plain.encode();
    assert_eq!(plain.len(), 20);
    assert!(BindingRequest::decode(&plain).is_ok());
    let changed = |change: fn(&mut Vec<u8>)| {
        let mut bytes = plain.clone();
        change(&mut bytes);
        BindingRequest::decode(&bytes)
    };
    // RFC 3489 had no cookie.
    assert!(changed(|bytes| bytes[4] = 0).is_err());
    assert!(changed(|bytes| bytes[3] = 4).is_err());
    assert!(changed(|bytes| bytes.push(0)).is_err());
    assert!(changed(|bytes| bytes[1] = 0x11).is_err(), "an indication");
    let with = |attributes: usize, length: u8| {
        let mut bytes = plain.clone();
        for _ in 0..attributes {
            bytes.extend([0x80, 0x22, 0, length]);
            bytes.resize(bytes.len() + usize::from(length), b'x');
        }
        let rest = (bytes.len() - 20) as u16;
        bytes[2..4].copy_from_slice(&rest.to_be_bytes());
        BindingRequest::decode(&bytes)
    };
    assert!(with(ATTRIBUTES_MAX, 4).is_ok());
    assert!(with(ATTRIBUTES_MAX + 1, 4).is_err());
    assert!(
        with(ATTRIBUTES_MAX, 40).is_err(),
        "over {STUN_BYTES_MAX} bytes"
    );
}

#[test]
fn errors_and_the_attributes_that_they_name() {
    let answer = BindingAnswer {
        transaction: TRANSACTION,
        fingerprint: true,
        result: Err(BindingError {
            code: UNKNOWN_ATTRIBUTE,
            unknown: vec![0x0003, 0x0024, 0x0025],
        }),
    };
    let bytes = answer.encode();
    assert!(bytes.len() <= STUN_ANSWER_BYTES_MAX, "{}", bytes.len());
    // Three attributes are six bytes and two of padding.
    assert_eq!(bytes[20..28], *b"\x00\x09\x00\x04\x00\x00\x04\x14");
    assert_eq!(
        bytes[28..40],
        *b"\x00\x0a\x00\x06\x00\x03\x00\x24\x00\x25\x00\x00"
    );
    assert_eq!(BindingAnswer::decode(&bytes), Ok(answer));
}

#[tokio::test]
async fn a_socket_of_its_own_answers_requests_and_nothing_else() {
    let server = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    tokio::spawn(async move { serve_stun(&server).await });
    let client = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.send_to(b"no request", address).await.unwrap();
    let request = BindingRequest {
        transaction: TRANSACTION,
        fingerprint: true,
        unknown: Vec::new(),
    };
    client.send_to(&request.encode(), address).await.unwrap();
    let mut buffer = [0; 100];
    let (length, from) = client.recv_from(&mut buffer).await.unwrap();
    assert_eq!(from, address);
    let answer = BindingAnswer::decode(&buffer[..length]).unwrap();
    assert_eq!(answer.transaction, TRANSACTION);
    assert_eq!(answer.result, Ok(client.local_addr().unwrap()));
}
